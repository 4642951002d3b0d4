#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#include "ulysses/transports/collective/spin.h"

namespace ulysses::transports {

using SharedWord = std::atomic<uint32_t>;
static_assert(SharedWord::is_always_lock_free && sizeof(SharedWord) == 4, "a futex is a plain 32-bit word");

// A word on which processes sleep, and how many do: without sleepers a change of the word costs no system call.
struct Bell {
  SharedWord word{0};
  SharedWord sleepers{0};
};

inline void ring(Bell& bell) {
  if (bell.sleepers.load() > 0) ::syscall(SYS_futex, &bell.word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Until the word is not `seen` any more, or a while: futexes wake for other reasons too.
inline void sleep_on(Bell& bell, uint32_t seen, std::chrono::nanoseconds at_most) {
  const timespec limit{static_cast<time_t>(at_most.count() / 1'000'000'000),
                       static_cast<long>(at_most.count() % 1'000'000'000)};
  bell.sleepers.fetch_add(1);
  ::syscall(SYS_futex, &bell.word, FUTEX_WAIT, seen, &limit, nullptr, 0);
  bell.sleepers.fetch_sub(1);
}

// True when done(), which must depend on the bell's word and what look() changes; false at the deadline. look() is
// called now and then, to see what rings no bell: a process that ended. An idle wait costs no time of a core.
template <typename Done, typename Look>
bool wait_for(Bell& bell, Clock::time_point deadline, const Done& done, const Look& look) {
  constexpr std::chrono::nanoseconds kLookEvery = std::chrono::milliseconds(50);
  if (spin(done)) return true;
  while (true) {
    const uint32_t seen = bell.word.load();
    if (done()) return true;
    const auto now = Clock::now();
    if (now >= deadline) return false;
    sleep_on(bell, seen, std::min<std::chrono::nanoseconds>(kLookEvery, deadline - now));
    if (done()) return true;
    look();
  }
}

}  // namespace ulysses::transports
