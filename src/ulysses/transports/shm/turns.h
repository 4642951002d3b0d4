#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace ulysses::transports {

// One thread at a time; the others wait, no longer than they want to. A std::timed_mutex of which ThreadSanitizer knows
// every step.
class Turns {
 public:
  // Held until the end of a scope, if it is held at all.
  class Turn {
   public:
    Turn(Turns& turns, std::chrono::milliseconds timeout) : turns_(turns), held_(turns.take(timeout)) {}
    ~Turn() {
      if (held_) turns_.give();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    bool held() const { return held_; }

   private:
    Turns& turns_;
    const bool held_;
  };

 private:
  bool take(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool free = given_.wait_until(lock, std::chrono::steady_clock::now() + timeout, [&] { return !taken_; });
    taken_ = taken_ || free;
    return free;
  }
  void give() {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken_ = false;
    given_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable given_;
  bool taken_ = false;
};

}  // namespace ulysses::transports
