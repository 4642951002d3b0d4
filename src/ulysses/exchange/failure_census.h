#pragma once

#include <string>
#include <string_view>

namespace c10d {
class ProcessGroup;
}

namespace ulysses::exchange {

// Who failed with this rank, after a collective failed: sentences that name every other rank, or say that the store is
// lost. "" for a group without a store (ranks that are threads name each other themselves) and where torch keeps it to
// itself, as older versions do. This rank writes `op` under a key of its own and reads the keys of the others.
// Comm:    no collective; a few small keys. A rank that never fails need not call it.
// Units:   waits up to 1.5 s for the others' reports, and never more than 2 s, even if the store hangs.
// Errors:  none: whatever goes wrong here becomes text.
std::string failure_census(const c10d::ProcessGroup& group, std::string_view op) noexcept;

}  // namespace ulysses::exchange
