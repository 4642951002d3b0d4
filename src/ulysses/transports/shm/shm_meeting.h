#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ulysses/transports/shm/process_life.h"
#include "ulysses/transports/shm/shm_layout.h"

namespace ulysses::transports {

// Where the processes of one group meet, and how the group dies. One object a rank, over one segment.
// A wait ends with the last rank's coming; with CP062 at once when another rank's process has ended or has left the
// group, naming it and its last call; or with CP062 after the timeout, naming the ranks that never came and whether
// their processes run, are stopped or were never there. After the last two the group is dead for every rank.
// meet() and next_half() are for one thread at a time; any thread may call the rest.
class ShmMeeting {
 public:
  ShmMeeting(ShmLayout layout, int64_t rank);

  int64_t rank() const { return rank_; }
  int64_t size() const { return layout_.ranks(); }
  const ShmLayout& layout() const { return layout_; }

  void begin_call(std::string_view op);                 // CP062 if the group is dead
  int64_t next_half() const { return (met_ + 1) % 2; }  // 0 and 1 in turn, the same on every rank
  void meet(std::string_view op, std::chrono::milliseconds timeout);

  bool is_dead() const;
  // Kills the group. The first reason stays.
  void kill(const std::string& what, const std::string& fix);
  [[noreturn]] void raise_dead(std::string_view op) const;
  void leave();  // no more calls of this rank

  // Why `peer` will never come, empty if it may: "rank 2, whose process 4711 ended; its last call was all_gather, …".
  std::string find_loss(int64_t peer) const;
  std::string describe(int64_t peer) const;  // "process 4711 is stopped; its last call was all_gather, the 7th …"

 private:
  bool has_come(int64_t peer, uint32_t meeting) const;
  bool all_have_come(uint32_t meeting) const;
  bool is_over(uint32_t meeting) const;
  void complete(uint32_t meeting);
  void look(uint32_t meeting, std::string_view op);
  void give_up(uint32_t meeting, std::string_view op, std::chrono::milliseconds timeout);
  bool try_kill(uint32_t state, const std::string& what, const std::string& fix);

  const ShmLayout layout_;
  const int64_t rank_;
  uint32_t met_ = 0;
  mutable std::mutex last_words_;
};

}  // namespace ulysses::transports
