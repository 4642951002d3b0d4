#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "collectives.h"
#include "ulysses/transports/shm/shm_backend.h"
#include "ulysses/transports/thread/keep_num_threads.h"
#include "ulysses/transports/thread/thread_world.h"

// Groups of our own transports, so that one suite asks all of them.
namespace ulysses::testing {

enum class Transport { kThreads, kShm };
inline std::ostream& operator<<(std::ostream& out, Transport transport) {
  return out << (transport == Transport::kThreads ? "threads" : "shm");
}
inline const auto every_transport = ::testing::Values(Transport::kThreads, Transport::kShm);

inline GroupPtr make_shm_group(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
                               std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(static_cast<int>(rank), static_cast<int>(size));
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<transports::ShmBackend>(store, rank, size, timeout);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

// Each rank with its own mapping of the segment, as in a process of its own, but on threads, so that a test sees them
// all. If one throws, its group is aborted and the first exception in time is rethrown.
inline void run_shm_ranks(int64_t size, const transports::RankFunction& fn,
                          std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::exception_ptr cause;
  std::vector<std::thread> threads;
  const transports::KeepNumThreads keep;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      GroupPtr group;
      try {
        group = make_shm_group(store, rank, size, timeout);
        fn(rank, group);
        group->shutdown();
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!cause) cause = std::current_exception();
        if (group) group->getBackend(c10::DeviceType::CPU)->abort();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (cause) std::rethrow_exception(cause);
}

inline void run_ranks_over(Transport transport, int64_t size, const transports::RankFunction& fn) {
  if (transport == Transport::kThreads) {
    transports::run_ranks(size, fn);
  } else {
    run_shm_ranks(size, fn);
  }
}

}  // namespace ulysses::testing
