#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "own_groups.h"
#include "ulysses/transports/shm/process_life.h"
#include "ulysses/transports/shm/segment.h"
#include "ulysses/transports/shm/shm_join.h"
#include "ulysses/transports/shm/shm_layout.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;
using std::chrono::milliseconds;

constexpr milliseconds kShort{200};

// What each rank's error says, in a group that has made one call and has this timeout from then on.
std::vector<std::string> errors_of(int64_t size, milliseconds timeout,
                                   const std::function<void(int64_t, c10d::ProcessGroup&)>& call) {
  std::vector<std::string> texts(static_cast<size_t>(size));
  run_shm_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    group->barrier()->wait();
    group->getBackend(c10::DeviceType::CPU)->setTimeout(timeout);
    texts[static_cast<size_t>(rank)] = error_of([&] { call(rank, *group); });
  });
  return texts;
}

TEST(ShmErrors, TimeoutNamesTheRanksThatNeverCameWithTheirLastCallAndKillsTheGroup) {
  std::atomic<int> gave_up{0};
  const auto texts = errors_of(4, kShort, [&](int64_t rank, auto& group) {
    while (rank % 2 == 1 && gave_up < 2) std::this_thread::sleep_for(milliseconds(5));
    try {
      all_reduce(group, at::ones({1}));
    } catch (...) {
      ++gave_up;
      EXPECT_TRUE(contains(error_of([&] { group.barrier(); }), "waited 200 ms in all_reduce"));  // at once
      throw;
    }
  });
  for (const auto& text : texts) {
    EXPECT_TRUE(contains(text, " waited 200 ms in all_reduce for ranks 1, 3, which never came (rank 1: process "))
        << text;
    EXPECT_TRUE(contains(text, " is running; its last call was barrier, number 1 of this group; rank 3: ")) << text;
    EXPECT_TRUE(contains(text, "no longer usable. Fix: find why ranks 1, 3 did not call all_reduce")) << text;
  }
}

TEST(ShmErrors, TheTimeoutOfACallComesFirst) {
  std::atomic<bool> is_over{false};
  errors_of(2, std::chrono::seconds(60), [&](int64_t rank, auto& group) {
    while (rank == 1 && !is_over) std::this_thread::sleep_for(milliseconds(5));
    Tensors tensors{at::ones({1})};
    c10d::AllreduceOptions options;
    options.timeout = milliseconds(40);
    const auto text = error_of([&] { group.allreduce(tensors, options); });
    is_over = true;
    EXPECT_TRUE(contains(text, "rank 0 waited 40 ms in all_reduce for rank 1, which never came")) << text;
  });
}

TEST(ShmErrors, ARankThatLeavesIsNamedAtOnce) {
  const auto texts = errors_of(3, std::chrono::seconds(60), [&](int64_t rank, auto& group) {
    if (rank == 2) group.getBackend(c10::DeviceType::CPU)->shutdown();
    all_reduce(group, at::ones({1}));
  });
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(
        contains(texts[rank], "waits in all_reduce for rank 2, which left the group; its last call was barrier"))
        << texts[rank];
  }
  EXPECT_TRUE(contains(texts[2], "rank 2 has left the group")) << texts[2];
}

TEST(ShmErrors, AbortAtAnyMomentUnblocksEveryRank) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> stopped{0};
    run_shm_ranks(3, [&](int64_t rank, const GroupPtr& group) {
      std::thread aborting;
      if (rank == 1) {
        aborting = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::microseconds(150 * round));
          group->getBackend(c10::DeviceType::CPU)->abort();
        });
      }
      const auto text = error_of([&] {
        for (;;) EXPECT_EQ(all_reduce(*group, at::ones({64})).sum().item<float>(), 192.0F);
      });
      EXPECT_TRUE(contains(text, "rank 1 failed: its group was aborted")) << text;
      if (rank == 1) aborting.join();
      ++stopped;
    });
    EXPECT_EQ(stopped, 3);
  }
}

TEST(ShmErrors, RecvTimesOutOrHearsThatTheSenderLeft) {
  std::atomic<bool> is_over{false};
  errors_of(2, kShort, [&](int64_t rank, auto& group) {
    while (rank == 0 && !is_over) std::this_thread::sleep_for(milliseconds(5));
    if (rank == 0) return;
    const auto text = error_of([&] { recv(group, at::empty({1}), 0, 5)->wait(); });
    is_over = true;
    EXPECT_TRUE(contains(text, "rank 1 waited 200 ms in recv for rank 0 (tag 5), which never sent (process ")) << text;
  });
  const auto texts = errors_of(2, std::chrono::seconds(60), [&](int64_t rank, auto& group) {
    if (rank == 1) recv(group, at::empty({1}), 0, 5)->wait();
  });
  EXPECT_TRUE(contains(texts[1], "rank 1 waits in recv (tag 5) for rank 0, which left the group")) << texts[1];
}

TEST(ShmErrors, ASenderThatLeavesWaitsUntilItsMessagesAreTaken) {
  run_shm_ranks(2, [](int64_t rank, const GroupPtr& group) {
    if (rank == 0) {
      send(*group, at::full({3}, 7.0), 1);
      group->getBackend(c10::DeviceType::CPU)->shutdown();
      return;
    }
    std::this_thread::sleep_for(milliseconds(100));
    auto message = at::zeros({3});
    recv(*group, message, 0)->wait();
    EXPECT_TRUE(at::equal(message, at::full({3}, 7.0)));
  });
}

TEST(ShmErrors, ThreadsOfOneRankTakeTurns) {
  constexpr int kThreads = 4;
  run_shm_ranks(2, [](int64_t rank, const GroupPtr& group) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int64_t call = 0; call < 200; ++call) {
          EXPECT_EQ(all_reduce(*group, at::full({3}, static_cast<double>(rank + 1)))[2].item<float>(), 3.0F);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(ShmErrors, AThreadThatWaitsTooLongForItsTurnSaysSoAndTheGroupLives) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto call = [](ShmHub& hub, milliseconds timeout) { hub.exchange(Contribution("barrier", 2), timeout, {}); };
  std::atomic<bool> has_waited{false};
  std::thread other([&] {
    const auto hub = join_shm(store, 1, 2, std::chrono::seconds(20));
    while (!has_waited) std::this_thread::sleep_for(milliseconds(5));
    call(*hub, std::chrono::seconds(20));
    call(*hub, std::chrono::seconds(20));
  });
  const auto hub = join_shm(store, 0, 2, std::chrono::seconds(20));
  std::thread first([&] { call(*hub, std::chrono::seconds(20)); });
  while (hub->meeting().layout().record(0).calls.load() == 0) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_TRUE(contains(error_of([&] { call(*hub, milliseconds(50)); }),
                       "another thread of this rank has been in a call of this group for 50 ms"));
  has_waited = true;
  first.join();
  call(*hub, std::chrono::seconds(20));
  other.join();
}

TEST(ShmErrors, GroupsOfOneProcessAreIndependent) {
  run_shm_ranks(2, [](int64_t rank, const GroupPtr& outer) {
    static const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto inner = make_shm_group(store, rank, 2);
    std::thread busy([&] {
      for (int call = 0; call < 300; ++call) all_reduce(*inner, at::ones({1}));
    });
    for (int call = 0; call < 300; ++call) EXPECT_EQ(all_reduce(*outer, at::ones({2}))[1].item<float>(), 2.0F);
    busy.join();
  });
}

}  // namespace
}  // namespace ulysses::transports
