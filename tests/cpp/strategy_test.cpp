// The whole path of each strategy over thread ranks, forward and backward, against attention in float64.
#include "ulysses/strategy/strategy.h"

#include <gtest/gtest.h>

#include "sharded_attention.h"
#include "ulysses/kernels/builtin_kernels.h"

namespace ulysses::strategy {
namespace {

using namespace ulysses::testing;
using partition::SequenceLayout;

using contract::UlyssesContextParallelPolicy;

const std::vector<int64_t>& worlds() {
  static const std::vector<int64_t> sizes = {1, 2, 3, 4, 7};
  return sizes;
}

UlyssesContextParallelPolicy uneven() {
  UlyssesContextParallelPolicy policy;
  policy.require_seq_divisible = false;
  return policy;
}

// Self-attention over S tokens cut by `layout`.
ShardedCase self_attention(const SequenceLayout& layout, int64_t heads, int64_t kv_heads, at::ScalarType dtype) {
  ShardedCase c;
  c.layout = c.kv_layout = layout;
  c.attention.q_len = c.attention.kv_len = layout.seq_len();
  c.attention.heads = heads;
  c.attention.kv_heads = kv_heads;
  c.attention.dtype = dtype;
  c.attention.head_dim = c.attention.v_head_dim = 8;
  return c;
}

class EveryStrategy : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Names, EveryStrategy, ::testing::Values("ulysses", "allgather_kv"),
                         [](const auto& test) { return test.param; });

// (8, 8) even heads; (30, 30) an uneven count; (12, 3) torn groups at W = 2, 4, 7; (8, 1) one KV head for every rank;
// (3, 3) and (2, 1) fewer heads than ranks. S = 1 and 3 leave ranks without tokens.
TEST_P(EveryStrategy, MatchesTheReferenceForAnyHeadsLengthsAndRanks) {
  const std::vector<std::pair<int64_t, int64_t>> head_counts = {{8, 8}, {30, 30}, {12, 3}, {8, 1}, {3, 3}, {2, 1}};
  int64_t turn = 0;
  for (const int64_t world : worlds()) {
    for (const auto& [heads, kv_heads] : head_counts) {
      for (const int64_t seq_len : {1, 3, 32}) {
        // Every value meets every other over the grid; the dtype and the mask take turns.
        ++turn;
        const auto dtype = turn % 2 == 0 ? at::kDouble : at::kFloat;
        ShardedCase c = self_attention(SequenceLayout(seq_len, world, uneven()), heads, kv_heads, dtype);
        c.attention.is_causal = turn % 3 == 0;
        c.attention.batch = 1 + turn % 2;
        c.options.strategy = GetParam();
        check_sharded(c);
      }
    }
  }
}

TEST_P(EveryStrategy, PaddingRowsAreNeverReadAndComeBackZero) {
  for (const int64_t world : worlds()) {
    for (const bool is_causal : {false, true}) {
      ShardedCase c = self_attention(SequenceLayout(5, world), 4, 2, at::kFloat);  // multiples of 8 rows a rank
      c.attention.is_causal = is_causal;
      c.options.strategy = GetParam();
      check_sharded(c);
    }
  }
}

TEST_P(EveryStrategy, ShardsOfAnyLengthsMadeElsewhere) {
  for (const auto& lengths : {std::vector<int64_t>{0, 9, 1, 0}, {4, 0, 0, 0}, {0, 0, 0, 5}, {1, 2, 3, 4}}) {
    ShardedCase c = self_attention(SequenceLayout::from_lengths(lengths), 6, 2, at::kDouble);
    c.attention.is_causal = true;
    c.options.strategy = GetParam();
    check_sharded(c);
  }
}

TEST_P(EveryStrategy, QueriesAndKeysWithLayoutsOfTheirOwn) {
  for (const int64_t world : worlds()) {
    for (const auto& [q_len, kv_len] : {std::pair<int64_t, int64_t>{5, 19}, {19, 5}, {8, 8}}) {
      ShardedCase c = self_attention(SequenceLayout(q_len, world, uneven()), 12, 3, at::kDouble);
      c.kv_layout = SequenceLayout(kv_len, world);  // padded
      c.attention.kv_len = kv_len;
      c.options.strategy = GetParam();
      check_sharded(c);
    }
  }
}

TEST_P(EveryStrategy, ValuesOfAnotherHeadSize) {
  ShardedCase c = self_attention(SequenceLayout(11, 3, uneven()), 5, 5, at::kFloat);
  c.attention.v_head_dim = 3;
  c.options.strategy = GetParam();
  check_sharded(c);
}

TEST_P(EveryStrategy, SixteenBit) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    ShardedCase c = self_attention(SequenceLayout(13, 4, uneven()), 12, 3, dtype);
    c.options.strategy = GetParam();
    check_sharded(c);
  }
}

// No layout anywhere: the uneven policy lets the ranks tell each other their lengths on every call.
TEST_P(EveryStrategy, LengthsThatAreExchanged) {
  for (const int64_t seq_len : {13, 3, 14}) {
    ShardedCase c = self_attention(SequenceLayout(seq_len, 4, uneven()), 6, 3, at::kDouble);
    c.options.strategy = GetParam();
    c.options.policy = uneven();
    c.with_layouts = false;
    check_sharded(c);
  }
}

// q = k = 0: every row is the mean of the values that it sees, whoever holds them; lse = ln(their count).
TEST_P(EveryStrategy, UniformProbeGivesTheMeanOfAllRanksValues) {
  for (const bool is_causal : {false, true}) {
    ShardedCase c = self_attention(SequenceLayout(9, 4, uneven()), 3, 3, at::kDouble);
    c.attention.is_causal = is_causal;
    c.options.strategy = GetParam();
    c.options.return_lse = true;
    c.backward = false;
    AttentionInputs in = random_inputs(c.attention);
    in.q.zero_();
    in.k.zero_();
    const AttentionResult result = run_sharded(c, in);
    for (int64_t row = 0; row < 9; ++row) {
      const int64_t seen = is_causal ? row + 1 : 9;
      EXPECT_LE(max_error(result.out.select(1, row), in.v.narrow(1, 0, seen).mean(1)), 1e-14) << row;
      EXPECT_LE(max_abs(result.lse.select(2, row) - std::log(static_cast<double>(seen))), 1e-14) << row;
    }
  }
}

// Token i's key answers only token i's query, so out = v: rows and heads come back where they belong. S_local = H = 8
// makes swapped dimensions show.
TEST_P(EveryStrategy, IdentityProbeGivesTheValuesBack) {
  ShardedCase c = self_attention(SequenceLayout(32, 4), 8, 8, at::kFloat);
  c.attention.head_dim = c.attention.v_head_dim = 32;
  c.attention.softmax_scale = 1.0;
  c.options.strategy = GetParam();
  AttentionInputs in = random_inputs(c.attention);
  in.q = (at::arange(32).unsqueeze(1) == at::arange(32)).to(at::kFloat).mul(60.0).view({1, 32, 1, 32});
  in.q = in.q.expand({2, 32, 8, 32}).contiguous();
  in.k = in.q.clone();
  const AttentionResult result = run_sharded(c, in);
  EXPECT_TRUE(at::equal(result.out, in.v));
  EXPECT_TRUE(at::equal(result.dv, in.grad_out));
}

AttentionResult on_one_rank(const ShardedCase& c, const AttentionInputs& in) {
  ShardedCase single = c;
  single.layout = single.kv_layout = SequenceLayout(c.attention.q_len, 1, uneven());
  return run_sharded(single, in);
}

// Heads are independent of each other, so exchanging them changes no bit of the forward, and for MHA none of backward.
TEST(Ulysses, IsBitIdenticalToOneRankWithTheSameKernel) {
  for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{6, 6}, {12, 3}}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      ShardedCase c = self_attention(SequenceLayout(77, 4, uneven()), heads, kv_heads, dtype);
      c.options.return_lse = true;
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = random_inputs(c.attention);
      const AttentionResult sharded = run_sharded(c, in), single = on_one_rank(c, in);
      EXPECT_TRUE(at::equal(sharded.out, single.out));
      EXPECT_TRUE(at::equal(sharded.lse, single.lse));
      if (heads != kv_heads) continue;
      EXPECT_TRUE(at::equal(sharded.dq, single.dq));
      EXPECT_TRUE(at::equal(sharded.dk, single.dk));
      EXPECT_TRUE(at::equal(sharded.dv, single.dv));
    }
  }
}

TEST(StrategyFor, AGroupOfOneNeedsNoStrategy) {
  AttentionPlan plan;
  EXPECT_EQ(strategy_for("allgather_kv", plan).name(), "local");
  plan.cp_size = 2;
  EXPECT_EQ(strategy_for("allgather_kv", plan).name(), "allgather_kv");
  EXPECT_EQ(strategy_for("ulysses", plan).name(), "ulysses");
}

}  // namespace
}  // namespace ulysses::strategy
