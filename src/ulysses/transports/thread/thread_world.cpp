#include "ulysses/transports/thread/thread_world.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/transports/thread/keep_num_threads.h"
#include "ulysses/transports/thread/thread_backend.h"

namespace ulysses::transports {
namespace {

constexpr int64_t kMaxRanks = 1024;

std::atomic<int64_t> next_world{0};

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const std::shared_ptr<ThreadHub>& hub, int64_t rank) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(static_cast<int>(rank), static_cast<int>(hub->size()));
  const c10::intrusive_ptr<c10d::Backend> backend = c10::make_intrusive<ThreadBackend>(hub, rank);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

[[noreturn]] void raise_argument(const char* id, std::string what, std::string fix) {
  throw base::Error({{id, base::ErrorKind::kInvalidArgument, std::move(what), "", std::move(fix)}}, "ThreadWorld");
}

std::string describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

// Runs the ranks of one world and keeps the first exception in time: the cause, not what it made others raise.
class RankThreads {
 public:
  RankThreads(ThreadWorld& world, const RankFunction& fn) : world_(world), fn_(fn) {}

  void run() {
    const int num_threads = std::max(1, at::get_num_threads() / static_cast<int>(world_.size()));
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < world_.size(); ++rank) {
      try {
        threads.emplace_back([this, rank, num_threads] { run_rank(rank, num_threads); });
      } catch (...) {
        fail(rank, std::current_exception());
        break;
      }
    }
    for (auto& thread : threads) thread.join();
    if (cause_) std::rethrow_exception(cause_);
  }

 private:
  void run_rank(int64_t rank, int num_threads) {
    try {
      at::set_num_threads(num_threads);
      fn_(rank, world_.group(rank));
    } catch (...) {
      fail(rank, std::current_exception());
    }
  }

  void fail(int64_t rank, std::exception_ptr error) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (cause_) return;  // the world is dead or dies with the cause
      cause_ = error;
    }
    world_.abort(rank, describe(error));
  }

  ThreadWorld& world_;
  const RankFunction& fn_;
  std::mutex mutex_;
  std::exception_ptr cause_;
};

}  // namespace

ThreadWorld::ThreadWorld(int64_t world_size, std::chrono::milliseconds timeout) {
  if (world_size < 1 || world_size > kMaxRanks) {
    raise_argument("CP006", base::cat("world_size=", world_size, " is not in 1 to ", kMaxRanks), "use world_size=2");
  }
  if (timeout.count() <= 0) {
    raise_argument("CP062", base::cat("timeout=", timeout.count(), " ms is not positive"), "use timeout=20000 ms");
  }
  hub_ = std::make_shared<ThreadHub>(world_size, timeout);
  const int64_t world = next_world++;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    groups_.push_back(make_group(hub_, rank));
    groups_.back()->setGroupName(base::cat(kThreadBackendName, ':', world, ':', rank));
    c10d::register_process_group(groups_.back()->getGroupName(), groups_.back());
  }
}

ThreadWorld::~ThreadWorld() {
  for (const auto& group : groups_) c10d::unregister_process_group(group->getGroupName());
}

int64_t ThreadWorld::size() const { return hub_->size(); }

c10::intrusive_ptr<c10d::ProcessGroup> ThreadWorld::group(int64_t rank) const {
  if (rank < 0 || rank >= size()) {
    raise_argument("CP062", base::cat("rank=", rank, " of a world of ", size(), " ranks"),
                   base::cat("use a rank from 0 to ", size() - 1));
  }
  return groups_[static_cast<size_t>(rank)];
}

void ThreadWorld::abort(int64_t rank, const std::string& reason) { hub_->abort(rank, reason); }

void run_ranks(int64_t world_size, const RankFunction& fn, std::chrono::milliseconds timeout) {
  ThreadWorld world(world_size, timeout);
  const KeepNumThreads keep;
  RankThreads(world, fn).run();
}

}  // namespace ulysses::transports
