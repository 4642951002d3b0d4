#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace ulysses::transports {

inline constexpr std::string_view kThreadBackendName = "ulysses_threads";

class ThreadHub;

// W ranks as threads of one process: the embedded default, for tests, notebooks and C++ programs. CPU only.
// Each rank's group is an ordinary c10d::ProcessGroup with the operations of CollectiveBackend, registered with c10d
// under a name of its own, so that an op that takes a group name finds it.
// Every wait ends: with the data, with CP062 after `timeout` naming the ranks that never came, or with CP062 naming
// the rank that raised. After a timeout or abort() the world is dead. Ranks that call different collectives, or with
// sizes, dtypes, roots or reductions that don't match, all get the same CP062 with the values; nothing is exchanged
// and the world stays usable. recv is done when its work is waited for; send never waits.
// Errors: CP006 (world_size), CP062.
class ThreadWorld {
 public:
  explicit ThreadWorld(int64_t world_size, std::chrono::milliseconds timeout = std::chrono::seconds(20));
  ~ThreadWorld();
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int64_t size() const;
  c10::intrusive_ptr<c10d::ProcessGroup> group(int64_t rank) const;
  // A rank failed: every other rank's current and next wait raises an error that names it and the reason.
  void abort(int64_t rank, const std::string& reason);

 private:
  std::shared_ptr<ThreadHub> hub_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

// Runs fn(rank, group) on world_size threads and joins them. The ranks share the caller's intra-op threads (all
// cores, unless OMP_NUM_THREADS or set_num_threads says fewer), at least one each; its setting is restored. If a rank
// throws, the others are unblocked and the first cause is rethrown (not the errors that it made others raise).
// Thread-local torch state (grad mode, inference mode, autocast) is not the caller's: every rank starts with grad
// enabled.
using RankFunction = std::function<void(int64_t rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group)>;
void run_ranks(int64_t world_size, const RankFunction& fn,
               std::chrono::milliseconds timeout = std::chrono::seconds(20));

}  // namespace ulysses::transports
