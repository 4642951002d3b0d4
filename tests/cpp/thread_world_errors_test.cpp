#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "collectives.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;
using c10d::ReduceOp;
using std::chrono::milliseconds;

constexpr milliseconds kShort{150};

TEST(ThreadWorldErrors, DifferentCollectivesAreAnErrorOnEveryRankThatNamesBoth) {
  std::atomic<int> errors{0};
  run_ranks(2, [&](int64_t rank, const GroupPtr& group) {
    const auto text = error_of([&] {
      if (rank == 0) {
        all_reduce(*group, at::ones({2}));
      } else {
        all_gather(*group, at::empty({4}), at::ones({2}))->wait();
      }
    });
    EXPECT_TRUE(contains(text, "rank 0 calls all_reduce, rank 1 calls all_gather")) << text;
    EXPECT_TRUE(contains(text, "still usable")) << text;
    ++errors;
    EXPECT_EQ(all_reduce(*group, at::ones({1})).item<float>(), 2.0F);
  });
  EXPECT_EQ(errors, 2);
}

// Every rank makes the bad call, sees `expected` in its error, and the world works afterwards.
template <typename Call>
void expect_refused_together(int64_t size, const std::string& expected, Call call) {
  std::atomic<int64_t> refused{0};
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    const auto text = error_of([&] { call(rank, *group); });
    EXPECT_TRUE(contains(text, expected)) << text;
    EXPECT_TRUE(contains(text, "still usable")) << text;
    refused += text.empty() ? 0 : 1;
    EXPECT_EQ(all_reduce(*group, at::ones({1})).item<float>(), static_cast<float>(size));
  });
  EXPECT_EQ(refused, size);
}

TEST(ThreadWorldErrors, SizeMismatchNamesRanksAndBytesOnEveryRank) {
  expect_refused_together(3, "rank 0 sends 8 bytes to rank 2, which expects 4 bytes", [](int64_t rank, auto& group) {
    all_to_all(group, at::empty({3}), at::ones({rank == 0 ? 4 : 3}), {1, 1, 1},
               rank == 0 ? Splits{1, 1, 2} : Splits{1, 1, 1})
        ->wait();
  });
}

TEST(ThreadWorldErrors, DtypeRootAndReductionMismatchAreNamed) {
  expect_refused_together(2, "rank 0 has dtype Float, rank 1 has dtype Int", [](int64_t rank, auto& group) {
    all_reduce(group, at::ones({1}, rank == 0 ? at::kFloat : at::kInt));
  });
  expect_refused_together(2, "rank 0 names root 0, rank 1 names root 1", [](int64_t rank, auto& group) {
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    Tensors tensors{at::ones({1})};
    group.broadcast(tensors, options)->wait();
  });
  expect_refused_together(2, "rank 0 reduces with op 0, rank 1 reduces with op 4", [](int64_t rank, auto& group) {
    all_reduce(group, at::ones({1}), rank == 0 ? ReduceOp::SUM : ReduceOp::MAX);
  });
}

TEST(ThreadWorldErrors, WhatOneRankRefusesNobodyWaitsFor) {
  expect_refused_together(2, "rank 1: a tensor of shape [3, 2] and strides [1, 3] is not contiguous",
                          [](int64_t rank, auto& group) {
                            auto tensor = at::ones({2, 3});
                            all_reduce(group, rank == 1 ? tensor.t() : at::ones({3, 2}));
                          });
  expect_refused_together(2, "rank 0: split sizes [1, 1] sum to 2, the tensor has 3 rows",
                          [](int64_t rank, auto& group) {
                            all_to_all(group, at::empty({2}), at::ones({rank == 0 ? 3 : 2}), {1, 1}, {1, 1})->wait();
                          });
  expect_refused_together(2, "rank 1: 3 rows do not divide by 2 ranks", [](int64_t rank, auto& group) {
    all_to_all(group, at::empty({2}), at::ones({2 + rank}))->wait();
  });
  expect_refused_together(2, "rank 1: an input and an output share memory", [](int64_t rank, auto& group) {
    auto tensor = at::ones({2});
    all_to_all(group, rank == 1 ? tensor : at::empty({2}), tensor)->wait();
  });
  expect_refused_together(2, "reduce op 5 is not one of SUM",
                          [](int64_t, auto& group) { all_reduce(group, at::ones({1}, at::kInt), ReduceOp::BAND); });
  expect_refused_together(2, "AVG of Int; use SUM",
                          [](int64_t, auto& group) { all_reduce(group, at::ones({1}, at::kInt), ReduceOp::AVG); });
}

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

TEST(ThreadWorldErrors, RecvOfAnotherSizeNamesBothAndTheWorldStaysUsable) {
  run_ranks(2, [&](int64_t rank, const GroupPtr& group) {
    if (rank == 0) {
      send(*group, at::ones({3}), 1)->wait();
    } else {
      const auto text = error_of([&] { recv(*group, at::ones({2}), 0)->wait(); });
      EXPECT_TRUE(contains(text, "rank 0 sent 12 bytes of Float to rank 1, which expects 8 bytes")) << text;
    }
    EXPECT_EQ(all_reduce(*group, at::ones({1})).item<float>(), 2.0F);
  });
}

TEST(ThreadWorldErrors, BadArgumentsAreRefused) {
  EXPECT_TRUE(contains(error_of([] { ThreadWorld world(0); }, "CP006"), "world_size=0 is not in 1 to 1024"));
  EXPECT_TRUE(contains(error_of([] { ThreadWorld world(2, milliseconds(0)); }), "timeout=0 ms"));
  const ThreadWorld world(2);
  EXPECT_TRUE(contains(error_of([&] { world.group(2); }), "rank=2 of a world of 2 ranks"));
}

}  // namespace
}  // namespace ulysses::transports
