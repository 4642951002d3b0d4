#include "ulysses/partition/sequence_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "ulysses/base/error.h"

namespace ulysses::partition {
namespace {

using contract::UlyssesContextParallelPolicy;
using Numbers = std::vector<int64_t>;

const UlyssesContextParallelPolicy kStrict{.auto_pad = false};
const UlyssesContextParallelPolicy kUneven{.require_seq_divisible = false};

template <typename Make>
std::string error_of(Make make, const std::string& id) {
  try {
    make();
  } catch (const base::Error& error) {
    EXPECT_EQ(error.id(), id);
    return error.what();
  }
  ADD_FAILURE() << "no " << id;
  return "";
}

TEST(PadMode, PadsTheEndOfTheSequence) {
  const SequenceLayout layout(3000, 4);
  EXPECT_EQ(layout.lengths(), (Numbers{752, 752, 752, 744}));
  EXPECT_EQ(layout.padded_lengths(), Numbers(4, 752));
  EXPECT_EQ(layout.seq_len(), 3000);
  EXPECT_EQ(layout.cp_size(), 4);
  EXPECT_EQ(SequenceLayout(3001, 4).lengths(), (Numbers{752, 752, 752, 745}));
  EXPECT_EQ(SequenceLayout(32760, 4).lengths(), (Numbers{8192, 8192, 8192, 8184}));  // 32760 = 32768 - 8
  EXPECT_EQ(SequenceLayout(32760, 4).padded_lengths(), Numbers(4, 8192));
}

TEST(PadMode, ShorterThanTheRankCount) {
  const SequenceLayout layout(7, 4);
  EXPECT_EQ(layout.lengths(), (Numbers{7, 0, 0, 0}));
  EXPECT_EQ(layout.padded_lengths(), Numbers(4, 8));
  EXPECT_EQ(layout.positions(0), (Numbers{0, 1, 2, 3, 4, 5, 6, -1}));
  EXPECT_EQ(layout.positions(3), Numbers(8, -1));
  EXPECT_TRUE(layout.tokens(3).empty());
}

TEST(StrictMode, RefusesWithNumbersThatWorkCP010CP011) {
  EXPECT_EQ(error_of([] { SequenceLayout(3001, 4, kStrict); }, "CP010"),
            "[SequenceLayout] seq_len=3001 is not divisible by cp_size=4. Shards must be equal under this policy. Fix: "
            "pad to 3008 (752 per rank), or auto_pad=True, or require_seq_divisible=False. [CP010]");
  EXPECT_EQ(
      error_of([] { SequenceLayout(3000, 4, kStrict); }, "CP011"),
      "[SequenceLayout] seq_len=3000 divides by cp_size=4 but not by cp_size*pad_multiple=4*8=32. Fix: pad to 3008 "
      "(752 per rank), or auto_pad=True, or pad_multiple=1 (750 per rank), or require_seq_divisible=False. [CP011]");
  EXPECT_NE(error_of([] { SequenceLayout(32760, 4, kStrict); }, "CP011").find("pad to 32768 (8192 per rank)"),
            std::string::npos);
}

TEST(StrictMode, EveryPrintedFixWorks) {
  EXPECT_EQ(SequenceLayout(3008, 4, kStrict).lengths(), Numbers(4, 752));
  EXPECT_EQ(SequenceLayout(3000, 4, {.auto_pad = true}).seq_len(), 3000);
  EXPECT_EQ(SequenceLayout(3000, 4, {.auto_pad = false, .pad_multiple = 1}).lengths(), Numbers(4, 750));
  EXPECT_EQ(SequenceLayout(3001, 4, {.require_seq_divisible = false, .auto_pad = false}).seq_len(), 3001);
  EXPECT_EQ(SequenceLayout(32768, 4, kStrict).lengths(), Numbers(4, 8192));
}

TEST(UnevenMode, ExactLengthsFirstRanksLonger) {
  EXPECT_EQ(SequenceLayout(3001, 4, kUneven).lengths(), (Numbers{751, 750, 750, 750}));
  EXPECT_EQ(SequenceLayout(3000, 4, kUneven).lengths(), Numbers(4, 750));
  EXPECT_EQ(SequenceLayout(32760, 4, kUneven).lengths(), Numbers(4, 8190));
  EXPECT_EQ(SequenceLayout(2, 4, kUneven).lengths(), (Numbers{1, 1, 0, 0}));
  EXPECT_EQ(SequenceLayout(3001, 4, kUneven).padded_lengths(), SequenceLayout(3001, 4, kUneven).lengths());
}

TEST(EveryMode, TokensTileAndPositionsCountThem) {
  for (const auto& policy :
       {UlyssesContextParallelPolicy{}, kUneven, UlyssesContextParallelPolicy{.pad_multiple = 1}}) {
    for (int64_t seq_len = 1; seq_len <= 70; ++seq_len) {
      for (int64_t cp_size = 1; cp_size <= 9; ++cp_size) {
        const SequenceLayout layout(seq_len, cp_size, policy);
        Numbers seen;
        for (int64_t rank = 0; rank < cp_size; ++rank) {
          const Numbers positions = layout.positions(rank);
          ASSERT_EQ(positions.size(), static_cast<size_t>(layout.padded_lengths()[static_cast<size_t>(rank)]));
          const auto padding = std::find(positions.begin(), positions.end(), -1);
          EXPECT_TRUE(std::all_of(padding, positions.end(), [](int64_t p) { return p == -1; }));
          EXPECT_EQ(padding - positions.begin(), layout.tokens(rank).size());
          seen.insert(seen.end(), positions.begin(), padding);
        }
        ASSERT_EQ(seen.size(), static_cast<size_t>(seq_len));
        for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], static_cast<int64_t>(i));
        const auto [low, high] = std::minmax_element(layout.padded_lengths().begin(), layout.padded_lengths().end());
        EXPECT_LE(*high - *low, policy.require_seq_divisible ? 0 : 1);
      }
    }
  }
}

TEST(FromLengths, TakesAnyShardsAndComparesByValue) {
  const auto layout = SequenceLayout::from_lengths({5, 0, 2}, 1);
  EXPECT_EQ(layout.tokens(2), (Range{5, 7}));
  EXPECT_EQ(layout.positions(2), (Numbers{5, 6}));
  EXPECT_TRUE(layout.positions(1).empty());
  EXPECT_EQ(layout.cp_rank(), 1);
  EXPECT_EQ(layout, SequenceLayout::from_lengths({5, 0, 2}, 1));
  EXPECT_NE(layout, SequenceLayout::from_lengths({5, 0, 2}));
  EXPECT_EQ(SequenceLayout::from_lengths({750, 750, 750, 750}), SequenceLayout(3000, 4, kUneven));
}

TEST(FromLengths, RefusesImpossibleListsCP012) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const Numbers& lengths : {Numbers{}, Numbers{0, 0}, Numbers{3, -1}, Numbers{kMax, 1}}) {
    error_of([&] { SequenceLayout::from_lengths(lengths); }, "CP012");
  }
  EXPECT_NE(error_of(
                [] {
                  SequenceLayout::from_lengths({0, 0});
                },
                "CP012")
                .find("lengths like [1, 0]"),
            std::string::npos);
  EXPECT_EQ(SequenceLayout::from_lengths({1, 0}).seq_len(), 1);
}

TEST(Layout, RefusesSizesAndPolicies) {
  error_of([] { SequenceLayout(0, 4); }, "CP006");
  error_of([] { SequenceLayout(8, 0); }, "CP006");
  error_of([] { SequenceLayout(8, 2, {.pad_multiple = -1}); }, "CP006");
  error_of([] { SequenceLayout(std::numeric_limits<int64_t>::max(), 4); }, "CP007");
  error_of([] { SequenceLayout(8, 2, {.output_restore_dim = 3}); }, "CP005");
  error_of([] { SequenceLayout(8, 2, {}, 2); }, "CP015");
  error_of([] { SequenceLayout::from_lengths({1, 1}, -1); }, "CP015");
  error_of([] { SequenceLayout(8, 2).tokens(2); }, "CP015");
}

}  // namespace
}  // namespace ulysses::partition
