#pragma once

#include <sched.h>

#include <chrono>

namespace ulysses::transports {

using Clock = std::chrono::steady_clock;

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  ::sched_yield();
#endif
}

// True as soon as done() is; false after a millisecond. A rank that comes soon is met without a sleep; a longer wait
// gives the core to ranks that compute.
template <typename Done>
bool spin(const Done& done) {
  constexpr int kPauses = 200;
  constexpr int kYieldsPerLook = 16;
  constexpr std::chrono::milliseconds kSpinTime{1};
  for (int i = 0; i < kPauses; ++i) {
    if (done()) return true;
    pause_core();
  }
  const auto end = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kYieldsPerLook; ++i) {
      if (done()) return true;
      ::sched_yield();
    }
  } while (Clock::now() < end);
  return false;
}

}  // namespace ulysses::transports
