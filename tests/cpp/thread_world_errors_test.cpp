#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "collectives.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;
using std::chrono::milliseconds;

constexpr milliseconds kShort{150};

TEST(ThreadWorldErrors, ARankThatRaisesUnblocksTheOthersAndItsExceptionIsRethrown) {
  std::atomic<int> unblocked{0};
  const auto start = std::chrono::steady_clock::now();
  try {
    run_ranks(4, [&](int64_t rank, const GroupPtr& group) {
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(20));  // the others sleep in the barrier or in recv by then
        throw std::runtime_error("boom 17");
      }
      const auto text = error_of([&] {
        if (rank == 3) {
          recv(*group, at::empty({1}), 2)->wait();
        } else {
          all_reduce(*group, at::ones({1}));
        }
      });
      EXPECT_TRUE(contains(text, "rank 2 failed: boom 17")) << text;
      EXPECT_TRUE(contains(text, "no longer usable")) << text;
      EXPECT_TRUE(contains(error_of([&] { group->barrier(); }), "rank 2 failed: boom 17"));
      ++unblocked;
      throw std::logic_error("an after-effect");
    });
    FAIL() << "nothing was rethrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "boom 17");
  }
  EXPECT_EQ(unblocked, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(ThreadWorldErrors, TimeoutNamesTheRanksThatNeverCameAndKillsTheWorld) {
  ThreadWorld world(4, kShort);
  std::vector<std::string> texts(4);
  std::vector<std::thread> threads;
  for (int64_t rank : {0, 2}) {
    threads.emplace_back([&, rank] {
      texts[static_cast<size_t>(rank)] = error_of([&] { all_reduce(*world.group(rank), at::ones({1})); });
    });
  }
  for (auto& thread : threads) thread.join();
  texts[3] = error_of([&] { all_reduce(*world.group(3), at::ones({1})); });  // comes too late
  for (const size_t rank : {0, 2, 3}) {
    EXPECT_TRUE(contains(texts[rank], "waited 150 ms in all_reduce for ranks 1, 3, which never came")) << texts[rank];
    EXPECT_TRUE(contains(texts[rank], "no longer usable")) << texts[rank];
  }
}

TEST(ThreadWorldErrors, RecvTimesOut) {
  ThreadWorld world(2, kShort);
  const auto text = error_of([&] { recv(*world.group(1), at::empty({1}), 0, 5)->wait(); });
  EXPECT_TRUE(contains(text, "rank 1 waited 150 ms in recv for rank 0 (tag 5), which never sent")) << text;
}

TEST(ThreadWorldErrors, TheTimeoutOfACallComesFirst) {
  ThreadWorld world(2, std::chrono::seconds(60));
  Tensors tensors{at::ones({1})};
  c10d::AllreduceOptions options;
  options.timeout = milliseconds(40);
  const auto text = error_of([&] { world.group(0)->allreduce(tensors, options); });
  EXPECT_TRUE(contains(text, "rank 0 waited 40 ms in all_reduce for rank 1, which never came")) << text;
}

TEST(ThreadWorldErrors, AbortAtAnyMomentUnblocksEveryRank) {
  for (int round = 0; round < 30; ++round) {
    ThreadWorld world(4, std::chrono::seconds(60));
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        const auto text = error_of([&] {
          for (;;) EXPECT_EQ(all_reduce(*world.group(rank), at::ones({64})).sum().item<float>(), 256.0F);
        });
        EXPECT_TRUE(contains(text, "rank 1 failed: stopped from outside")) << text;
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(150 * round));
    world.abort(1, "stopped from outside");
    for (auto& thread : threads) thread.join();
  }
}

TEST(ThreadWorldErrors, BadArgumentsAreRefused) {
  EXPECT_TRUE(contains(error_of([] { ThreadWorld world(0); }, "CP006"), "world_size=0 is not in 1 to 1024"));
  EXPECT_TRUE(contains(error_of([] { ThreadWorld world(2, milliseconds(0)); }), "timeout=0 ms"));
  const ThreadWorld world(2);
  EXPECT_TRUE(contains(error_of([&] { world.group(2); }), "rank=2 of a world of 2 ranks"));
}

}  // namespace
}  // namespace ulysses::transports
