// Exact checksums, and the check that tensors are equal on every rank.
#include "ulysses/doctor/check_same.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>

#include "collectives.h"
#include "ulysses/exchange/checksum.h"
#include "ulysses/transports/recording/recording_group.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::doctor {
namespace {

using namespace ulysses::testing;
using exchange::checksum;
using exchange::Group;
using Named = std::map<std::string, at::Tensor>;

at::Tensor counted(at::ScalarType dtype) { return at::arange(24, at::kDouble).view({2, 3, 4}).to(dtype); }

TEST(Checksum, SeesOneElementASwapAndTheSignOfZeroInEveryDtype) {
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                           at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor tensor = counted(dtype);
    EXPECT_EQ(checksum(tensor), checksum(tensor.clone())) << dtype;
    at::Tensor one = tensor.clone();
    one.view({-1})[17].copy_(tensor.view({-1})[0]);
    EXPECT_NE(checksum(one), checksum(tensor)) << dtype;
    if (dtype == at::kBool) continue;  // all but the first are true
    at::Tensor swapped = tensor.clone();
    swapped.view({-1})[17].copy_(tensor.view({-1})[1]);
    swapped.view({-1})[1].copy_(tensor.view({-1})[17]);
    EXPECT_NE(checksum(swapped), checksum(tensor)) << dtype;
  }
  EXPECT_NE(checksum(at::zeros({3})), checksum(-at::zeros({3})));
}

TEST(Checksum, DoesNotDependOnStridesAndHasNoHolesInLongTensors) {
  const at::Tensor tensor = counted(at::kFloat);
  EXPECT_EQ(checksum(tensor.transpose(0, 2).contiguous().transpose(0, 2)), checksum(tensor));
  at::Tensor large = at::ones({(int64_t{1} << 22) + 3}, at::kByte);  // more than is held at a time
  const int64_t before = checksum(large);
  for (const int64_t place : {int64_t{0}, (int64_t{1} << 22) - 1, int64_t{1} << 22, (int64_t{1} << 22) + 2}) {
    large[place] = 2;
    EXPECT_NE(checksum(large), before) << place;
    large[place] = 1;
  }
  EXPECT_EQ(checksum(large), before);
  // Round float64 have nothing in their low bits, and these weights differ by a large power of two.
  at::Tensor round = at::ones({8193}, at::kDouble), moved = at::ones({8193}, at::kDouble);
  round[0] = 2;
  moved[8192] = 2;
  EXPECT_NE(checksum(round), checksum(moved));
}

// What each rank of a world gets; empty where it got no error. The group must serve a further call.
std::vector<std::string> texts_of(int64_t world, const std::function<Named(int64_t rank)>& tensors) {
  std::vector<std::string> texts(static_cast<size_t>(world));
  transports::run_ranks(world, [&](int64_t rank, const GroupPtr& process_group) {
    const Group group(process_group);
    texts[static_cast<size_t>(rank)] = error_of([&] { check_same(tensors(rank), group); }, "CP068");
    EXPECT_EQ(error_of([&] { check_same({{"x", at::ones({2})}}, group); }, "CP068"), "");
  });
  return texts;
}

void expect_on_every_rank(const std::vector<std::string>& texts, const std::string& part) {
  for (const std::string& text : texts) EXPECT_TRUE(contains(text, part)) << text;
}

TEST(CheckSame, EqualTensorsPassWithOneCollectiveAndNoneInAGroupOfOne) {
  for (const int64_t world : {1, 2, 4}) {
    transports::run_ranks(world, [&](int64_t, const GroupPtr& process_group) {
      const auto recorder = std::make_shared<transports::Recorder>();
      check_same({{"a", counted(at::kFloat)}, {"b", at::zeros({0})}},
                 Group(transports::record_group(process_group, recorder)));
      ASSERT_EQ(recorder->records().size(), world == 1 ? 0U : 1U);
      for (const auto& record : recorder->records()) EXPECT_EQ(record.bytes_sent, 16 * (world - 1));
    });
  }
}

TEST(CheckSame, OtherValuesAreNamedWithTheRanksThatLeaveTheMajorityCP068) {
  const auto texts = texts_of(4, [](int64_t rank) {
    return Named{{"noise", at::ones({2, 4}) * (rank % 2 == 0 ? 7 : rank)}, {"text", at::ones({3})}};
  });
  expect_on_every_rank(texts, "noise has other values on ranks 1, 3; is float32 [2, 4] on ranks 0, 2 (rank ");
  expect_on_every_rank(texts, "broadcast noise from rank 0");
  for (const std::string& text : texts) EXPECT_FALSE(contains(text, "text")) << text;
  // The majority need not hold rank 0; without one, rank 0 counts.
  expect_on_every_rank(texts_of(3,
                                [](int64_t rank) {
                                  return Named{{"x", at::ones({1}) * (rank == 0 ? 2 : 1)}};
                                }),
                       "x has other values on rank 0; is float32 [1] on ranks 1, 2");
  expect_on_every_rank(texts_of(2,
                                [](int64_t rank) {
                                  return Named{{"x", at::ones({1}) * (rank + 1)}};
                                }),
                       "x has other values on rank 1; is float32 [1] on rank 0");
}

TEST(CheckSame, AnotherDtypeShapeOrNameIsNamedCP068) {
  const auto texts = texts_of(3, [](int64_t rank) {
    Named tensors{{"a", at::ones({2}, rank == 1 ? at::kHalf : at::kFloat)},
                  {"b", at::ones({rank == 2 ? 5 : 4})},
                  {"two\nlines", at::ones({1}) * rank}};
    if (rank != 0) tensors["extra"] = at::ones({1});
    if (rank == 2) tensors["single"] = at::ones({1});
    return tensors;
  });
  expect_on_every_rank(texts, "a is float16 [2] on rank 1; is float32 [2] on ranks 0, 2");
  expect_on_every_rank(texts, "Fix: make a float32 [2] on every rank.");
  expect_on_every_rank(texts, "b is float32 [5] on rank 2; is float32 [4] on ranks 0, 1");
  expect_on_every_rank(texts, "extra is missing on rank 0; is float32 [1] on ranks 1, 2");
  expect_on_every_rank(texts, "single is float32 [1] on rank 2; is missing on ranks 0, 1");
  expect_on_every_rank(texts, "Fix: pass single on every rank or on none.");
  expect_on_every_rank(texts, "two lines has other values on ranks 1, 2; is float32 [1] on rank 0");
}

TEST(CheckSame, WhatCannotBeComparedIsNotPassedOverCP068) {
  const auto texts = texts_of(2, [](int64_t rank) {
    return Named{{"sparse", at::ones({2, 2}).to_sparse()}, {"none", rank == 0 ? at::ones({1}) : at::Tensor()}};
  });
  expect_on_every_rank(texts, "sparse is float32 [2, 2] without dense values on ranks 0, 1");
  expect_on_every_rank(texts, "Fix: pass sparse as a dense tensor with values.");
  expect_on_every_rank(texts, "none is None on rank 1; is float32 [1] on rank 0");
}

}  // namespace
}  // namespace ulysses::doctor
