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
  kAlways,  // every call
  kOff,     // never: the caller vouches for it
};

// "auto", "always" or "off"; anything else is nullopt. The environment variable ULYSSES_AGREEMENT=always turns auto
// into always.
std::optional<AgreementMode> agreement_mode(std::string_view word);

struct Agreement {
  bool compared = false;
  std::vector<std::vector<int64_t>> numbers;  // one row per rank when compared
  std::vector<std::string> texts;             // one per rank when they differ or a rank failed; else empty
};

// Compares this rank's text with the others' before any data moves.
// `failed` marks a rank whose own validation failed: it takes part, carrying its text, so that nobody waits for it.
// `numbers` (equal count on every rank) are handed to everybody when a comparison runs; `always` forces one.
// Comm:    nothing, one small all-gather, or three when texts differ. Every rank of the group must call it.
// A text that was once agreed on this group is not compared again under kAuto, so a rank that later leaves it is not
// seen: see Note [What agreement cannot see] in the .cpp.
Agreement agree(const Group& group, const std::string& text, bool failed, const std::vector<int64_t>& numbers,
                AgreementMode mode, bool always);

}  // namespace ulysses::exchange
