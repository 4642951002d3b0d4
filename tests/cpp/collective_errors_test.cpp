#include <gtest/gtest.h>

#include <atomic>

#include "own_groups.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;
using c10d::ReduceOp;

// What the ranks of a group refuse together; afterwards the group serves the next call.
class EveryTransportRefuses : public ::testing::TestWithParam<Transport> {
 protected:
  // Every rank makes the bad call, sees `expected` in its error, and the group works afterwards.
  template <typename Call>
  void expect_refused_together(int64_t size, const std::string& expected, Call call) const {
    std::atomic<int64_t> refused{0};
    run_ranks_over(GetParam(), size, [&](int64_t rank, const GroupPtr& group) {
      const auto text = error_of([&] { call(rank, *group); });
      EXPECT_TRUE(contains(text, expected)) << text;
      EXPECT_TRUE(contains(text, "still usable")) << text;
      refused += text.empty() ? 0 : 1;
      EXPECT_EQ(all_reduce(*group, at::ones({1})).item<float>(), static_cast<float>(size));
    });
    EXPECT_EQ(refused, size);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryTransportRefuses, every_transport);

TEST_P(EveryTransportRefuses, DifferentCollectivesAreAnErrorOnEveryRankThatNamesBoth) {
  std::atomic<int> errors{0};
  run_ranks_over(GetParam(), 2, [&](int64_t rank, const GroupPtr& group) {
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

TEST_P(EveryTransportRefuses, SizeMismatchNamesRanksAndBytesOnEveryRank) {
  expect_refused_together(3, "rank 0 sends 8 bytes to rank 2, which expects 4 bytes", [](int64_t rank, auto& group) {
    all_to_all(group, at::empty({3}), at::ones({rank == 0 ? 4 : 3}), {1, 1, 1},
               rank == 0 ? Splits{1, 1, 2} : Splits{1, 1, 1})
        ->wait();
  });
}

TEST_P(EveryTransportRefuses, DtypeRootAndReductionMismatchAreNamed) {
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

TEST_P(EveryTransportRefuses, WhatOneRankRefusesNobodyWaitsFor) {
  expect_refused_together(2, "rank 1: a tensor has layout Sparse, not strided", [](int64_t rank, auto& group) {
    const auto tensor = at::ones({2, 3});
    all_reduce(group, rank == 1 ? tensor.to_sparse() : tensor);
  });
  expect_refused_together(2, "rank 0: split sizes [1, 1] sum to 2, the tensor has 3 rows",
                          [](int64_t rank, auto& group) {
                            all_to_all(group, at::empty({2}), at::ones({rank == 0 ? 3 : 2}), {1, 1}, {1, 1})->wait();
                          });
  expect_refused_together(2, "rank 1: 3 rows do not divide by 2 ranks", [](int64_t rank, auto& group) {
    all_to_all(group, at::empty({2}), at::ones({2 + rank}))->wait();
  });
  expect_refused_together(2, "rank 0: 3 split sizes, expected 2", [](int64_t rank, auto& group) {
    all_to_all(group, at::empty({2}), at::ones({2}), {1, 1}, rank == 0 ? Splits{1, 1, 0} : Splits{1, 1})->wait();
  });
  expect_refused_together(2, "rank 0: tensors of dtype Float and Int in one call", [](int64_t rank, auto& group) {
    all_gather(group, at::empty({2}, rank == 0 ? at::kInt : at::kFloat), at::ones({1}))->wait();
  });
  expect_refused_together(2, "root 2 of 2 ranks", [](int64_t, auto& group) {
    c10d::BroadcastOptions options;
    options.rootRank = 2;
    Tensors tensors{at::ones({1})};
    group.broadcast(tensors, options)->wait();
  });
}

TEST_P(EveryTransportRefuses, MemoryThatWouldBeReadAfterItIsWritten) {
  expect_refused_together(2, "rank 1: an input and an output share memory", [](int64_t rank, auto& group) {
    auto tensor = at::ones({2});
    all_to_all(group, rank == 1 ? tensor : at::empty({2}), tensor)->wait();
  });
  expect_refused_together(2, "rank 0: an input and an output share memory", [](int64_t rank, auto& group) {
    auto whole = at::ones({2});
    all_gather(group, whole, rank == 0 ? whole.narrow(0, 1, 1) : at::ones({1}))->wait();  // the place of rank 1
  });
  expect_refused_together(
      2, "rank 0: an output of shape [2] and strides [0] has several elements in one place",
      [](int64_t rank, auto& group) { all_reduce(group, rank == 0 ? at::ones({1}).expand({2}) : at::ones({2})); });
}

TEST_P(EveryTransportRefuses, ReductionsThatTheDtypeDoesNotHave) {
  const auto expect_refused = [&](const std::string& expected, at::ScalarType dtype, ReduceOp op) {
    expect_refused_together(2, expected, [&](int64_t, auto& group) { all_reduce(group, at::ones({1}, dtype), op); });
  };
  expect_refused("reduce op 9 is not one of SUM", at::kInt, ReduceOp::UNUSED);
  expect_refused("AVG of Int; use SUM", at::kInt, ReduceOp::AVG);
  expect_refused("BAND, BOR or BXOR of Float; only integers have bits", at::kFloat, ReduceOp::BAND);
  expect_refused("MIN or MAX of ComplexFloat; complex numbers have no order", at::kComplexFloat, ReduceOp::MIN);
  expect_refused("MIN or MAX of UInt64; use int64", at::kUInt64, ReduceOp::MAX);
}

TEST_P(EveryTransportRefuses, RecvOfAnotherSizeNamesBothAndTheWorldStaysUsable) {
  run_ranks_over(GetParam(), 2, [&](int64_t rank, const GroupPtr& group) {
    if (rank == 0) {
      send(*group, at::ones({3}), 1)->wait();
    } else {
      const auto text = error_of([&] { recv(*group, at::ones({2}), 0)->wait(); });
      EXPECT_TRUE(contains(text, "rank 0 sent 12 bytes of Float to rank 1, which expects 8 bytes")) << text;
    }
    EXPECT_EQ(all_reduce(*group, at::ones({1})).item<float>(), 2.0F);
  });
}

}  // namespace
}  // namespace ulysses::transports
