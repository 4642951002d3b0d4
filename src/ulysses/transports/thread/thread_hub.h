#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "ulysses/transports/collective/contribution.h"
#include "ulysses/transports/collective/work.h"

namespace ulysses::transports {

// Where the rank threads of one world meet: one contribution per rank, a barrier, mailboxes, and the reason why the
// world is dead, if it is. Every wait has an end: the data, the timeout or a dead world, the last two as CP062.
class ThreadHub final : public Mail {
 public:
  ThreadHub(int64_t size, std::chrono::milliseconds timeout);
  ThreadHub(const ThreadHub&) = delete;
  ThreadHub& operator=(const ThreadHub&) = delete;

  int64_t size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Meets the other ranks, copies the blocks meant for this rank into `receive`, then runs `combine`, while peers'
  // blocks may be read. If the ranks disagree nothing is copied and every rank gets the same CP062.
  void exchange(int64_t rank, Contribution own, std::chrono::milliseconds timeout,
                const std::function<void()>& combine);
  const Contribution& contribution(int64_t rank) const { return contributions_[static_cast<size_t>(rank)]; }

  void post(const Address& address, const at::Tensor& message) override;  // never waits
  uint64_t expect(const Address& address) override;
  bool has_message(const Address& address, uint64_t ticket) override;
  at::Tensor take(const Address& address, uint64_t ticket, std::chrono::milliseconds timeout) override;

  // Kills the world. The first reason stays.
  void abort(int64_t rank, const std::string& reason);

 private:
  enum class Phase { kEnter, kLeave };
  struct Mailbox {
    uint64_t posted = 0, expected = 0;
    std::map<uint64_t, at::Tensor> messages;
  };
  struct alignas(64) Arrivals {
    std::atomic<uint64_t> count{0};
  };

  void arrive(int64_t rank, Phase phase, std::chrono::milliseconds timeout);
  bool met(uint64_t generation, Phase phase) const;
  void give_up(int64_t rank, uint64_t generation, std::chrono::milliseconds timeout);
  void kill(const std::string& reason, const std::string& fix);  // mutex_ held
  std::vector<int64_t> absent_ranks(int64_t rank) const;
  [[noreturn]] void raise_dead(int64_t rank, std::string_view op) const;

  const int64_t size_;
  const std::chrono::milliseconds timeout_;
  std::vector<Contribution> contributions_;
  std::vector<Arrivals> arrivals_;

  // Note [One word decides]: arrived ranks, the dead bit and the generation share one atomic word, so that a meeting
  // is either complete for every rank or for none, however close a timeout or an abort comes.
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> sleepers_{0};
  mutable std::mutex mutex_;  // guards all below and the sleep
  std::condition_variable wake_;
  std::map<std::tuple<int64_t, int64_t, int>, Mailbox> mail_;
  std::string death_, death_fix_;
};

}  // namespace ulysses::transports
