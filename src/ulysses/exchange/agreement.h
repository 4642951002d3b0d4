#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ulysses/exchange/group.h"

namespace ulysses::exchange {

enum class AgreementMode {
  kAuto,    // every call where comparing is free; else on the first use of each text on this group
  kAlways,  // every call, and how attend() ended on each rank
  kOff,     // never: the caller vouches for it
};

// "auto", "always" or "off"; anything else is nullopt. The environment variable ULYSSES_AGREEMENT=always turns auto
// into always.
std::optional<AgreementMode> agreement_mode(std::string_view word);

// What one rank brings to a comparison. `numbers` must have the same count on every rank.
struct AgreementRequest {
  std::string text;
  AgreementMode mode = AgreementMode::kAuto;
  std::vector<int64_t> numbers = {};  // handed to everybody when a comparison runs
  bool numbers_needed = false;        // then one runs whatever the mode
  bool failed = false;                // this rank's own validation failed: it takes part, so that nobody waits for it
  bool capturing = false;             // CUDA graph capture: the host can wait for nothing now
};

struct Agreement {
  bool compared = false;
  bool impossible = false;                    // a comparison was due under capture; nothing was sent
  std::vector<std::vector<int64_t>> numbers;  // one row per rank when compared
  std::vector<std::string> texts;             // one per rank when they differ or a rank failed; else empty
};

// Compares this rank's text with the others' before any data moves.
// Comm:    nothing, one small all-gather, or three when texts differ. Every rank of the group must call it.
// A text that was once agreed on this group is not compared again under kAuto, so a rank that later leaves it is not
// seen: see Note [What agreement cannot see] in the .cpp.
Agreement agree(const Group& group, const AgreementRequest& request);

}  // namespace ulysses::exchange
