#include "ulysses/kernels/causal_blocks.h"

#include <gtest/gtest.h>

#include <array>

namespace ulysses::kernels {
namespace {

using partition::Range;

constexpr int64_t kSide = 7;

// How often each (query, key) pair is computed.
using Counts = std::array<std::array<int, kSide>, kSide>;

Counts count_pairs(const std::vector<Block>& blocks) {
  Counts counts{};
  for (const Block& block : blocks) {
    for (int64_t i = block.q.begin; i < block.q.end; ++i) {
      for (int64_t j = block.kv.begin; j < block.kv.end; ++j) {
        if (!block.is_causal || j - block.kv.begin <= i - block.q.begin) ++counts[i][j];
      }
    }
  }
  return counts;
}

void check_blocks(const Range& q, const Range& kv, bool is_causal) {
  SCOPED_TRACE(::testing::Message() << "q [" << q.begin << ", " << q.end << ") kv [" << kv.begin << ", " << kv.end
                                    << ") causal " << is_causal);
  const std::vector<Block> blocks = causal_blocks(q, kv, is_causal);
  EXPECT_LE(blocks.size(), is_causal ? 3u : 1u);
  for (const Block& block : blocks) {
    EXPECT_FALSE(block.q.empty() || block.kv.empty());
    EXPECT_GE(block.q.begin, q.begin);
    EXPECT_LE(block.q.end, q.end);
    EXPECT_GE(block.kv.begin, kv.begin);
    EXPECT_LE(block.kv.end, kv.end);
    EXPECT_TRUE(!block.is_causal || block.q == block.kv);
  }
  const Counts counts = count_pairs(blocks);
  for (int64_t i = 0; i < kSide; ++i) {
    int blocks_of_row = 0;
    for (const Block& block : blocks) blocks_of_row += i >= block.q.begin && i < block.q.end;
    EXPECT_LE(blocks_of_row, 2) << "row " << i;
    for (int64_t j = 0; j < kSide; ++j) {
      const bool inside = i >= q.begin && i < q.end && j >= kv.begin && j < kv.end;
      EXPECT_EQ(counts[i][j], inside && (!is_causal || j <= i) ? 1 : 0) << "query " << i << " key " << j;
    }
  }
}

TEST(CausalBlocks, CoverEveryVisiblePairExactlyOnce) {
  for (int64_t a = 0; a <= kSide; ++a) {
    for (int64_t b = a; b <= kSide; ++b) {
      for (int64_t c = 0; c <= kSide; ++c) {
        for (int64_t d = c; d <= kSide; ++d) {
          check_blocks({a, b}, {c, d}, false);
          check_blocks({a, b}, {c, d}, true);
        }
      }
    }
  }
}

TEST(CausalBlocks, ShardsOfOneLayoutAreFullEmptyOrDiagonal) {
  EXPECT_EQ(causal_blocks({8, 16}, {0, 8}, true), (std::vector<Block>{{{8, 16}, {0, 8}, false}}));
  EXPECT_EQ(causal_blocks({0, 8}, {8, 16}, true), std::vector<Block>{});
  EXPECT_EQ(causal_blocks({8, 16}, {8, 16}, true), (std::vector<Block>{{{8, 16}, {8, 16}, true}}));
}

TEST(CausalBlocks, LocalQueriesAgainstAllKeys) {
  EXPECT_EQ(causal_blocks({8, 16}, {0, 32}, true),
            (std::vector<Block>{{{8, 16}, {0, 8}, false}, {{8, 16}, {8, 16}, true}}));
}

}  // namespace
}  // namespace ulysses::kernels
