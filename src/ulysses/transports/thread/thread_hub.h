#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace ulysses::transports {

template <typename Byte>
struct Block {
  Byte* data = nullptr;
  int64_t bytes = 0;
};

// What one rank brings to a collective. Written by its rank alone before the ranks meet, read by all of them after.
struct Contribution {
  std::string_view op;  // a literal: "all_to_all"
  std::string problem;  // why this rank refuses the call; it takes part all the same, so that nobody waits for it
  at::ScalarType dtype = at::ScalarType::Undefined;
  int64_t root = -1;                         // -1: the collective has none
  int64_t reduce_op = -1;                    // -1: nothing is reduced
  std::vector<Block<const std::byte>> send;  // per destination
  std::vector<Block<std::byte>> receive;     // per source; without data: sizes only, the caller combines
  std::vector<at::Tensor> keep_alive;        // peers may read these until every rank has left
};

// Why these ranks cannot do this collective together, empty if they can. Pure: every rank comes to the same text.
std::string find_disagreement(const std::vector<Contribution>& ranks);

// Where the rank threads of one world meet: one contribution per rank, a barrier, mailboxes, and the reason why the
// world is dead, if it is. Every wait has an end: the data, the timeout or a dead world, the last two as CP062.
class ThreadHub {
 public:
  ThreadHub(int64_t size, std::chrono::milliseconds timeout);
  ThreadHub(const ThreadHub&) = delete;
  ThreadHub& operator=(const ThreadHub&) = delete;

  int64_t size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // The rank's own contribution, emptied, to be filled in and exchanged. CP062 if the world is dead.
  Contribution& begin(int64_t rank, std::string_view op);
  // Meets the other ranks, copies the blocks meant for this rank into `receive`, then runs `combine`, if any, while
  // peers' blocks may be read. If the ranks disagree nothing is copied and every rank gets the same CP062.
  void exchange(int64_t rank, std::chrono::milliseconds timeout, const std::function<void()>& combine = nullptr);
  const Contribution& contribution(int64_t rank) const { return contributions_[static_cast<size_t>(rank)]; }

  struct Address {
    int64_t source = 0, destination = 0;
    int tag = 0;
    auto key() const { return std::tuple(source, destination, tag); }
  };
  void post(const Address& address, at::Tensor message);  // never waits; the message must be the mailbox's own
  uint64_t expect(const Address& address);                // ticket of the next message, in the order of the calls
  bool has_message(const Address& address, uint64_t ticket);
  at::Tensor take(const Address& address, uint64_t ticket, std::chrono::milliseconds timeout);

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
  bool spin(uint64_t generation, Phase phase) const;
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
