// The data movements alone, with values that say where they come from; and the comparison before them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>

#include "collectives.h"
#include "reference_attention.h"
#include "ulysses/exchange/agreement.h"
#include "ulysses/exchange/head_exchange.h"
#include "ulysses/exchange/token_gather.h"
#include "ulysses/exchange/token_rows.h"
#include "ulysses/partition/traffic.h"
#include "ulysses/transports/recording/recording_group.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::exchange {
namespace {

using namespace ulysses::testing;
using partition::HeadRanges;
using transports::Recorder;
using transports::run_ranks;

// [B, S, H, D] whose every element tells its place.
at::Tensor numbered(int64_t batch, int64_t seq_len, int64_t heads, int64_t head_dim, int64_t salt) {
  return at::arange(batch * seq_len * heads * head_dim, at::kDouble)
      .add(1e6 * static_cast<double>(salt))
      .view({batch, seq_len, heads, head_dim});
}

struct Cut {
  std::vector<int64_t> lengths;
  int64_t heads, kv_heads;
  int64_t begin(int64_t rank) const { return std::accumulate(lengths.begin(), lengths.begin() + rank, int64_t{0}); }
  int64_t seq_len() const { return begin(static_cast<int64_t>(lengths.size())); }
  int64_t world() const { return static_cast<int64_t>(lengths.size()); }
};

// Uneven and empty shards; torn groups, fewer KV heads than ranks, fewer heads than ranks.
const std::vector<Cut>& cuts() {
  static const std::vector<Cut> all = {{{5}, 4, 2},           {{3, 3}, 4, 4},       {{0, 4, 3}, 30, 30},
                                       {{2, 0, 1, 4}, 12, 3}, {{1, 1, 1, 1}, 2, 1}, {{1, 2, 0, 1, 1, 0, 2}, 3, 3},
                                       {{0, 0, 6, 0}, 8, 1}};
  return all;
}

at::Tensor rows_with_padding(const at::Tensor& shard, int64_t padding) {
  return at::cat({shard, at::full({shard.size(0), padding, shard.size(2), shard.size(3)},
                                  std::numeric_limits<double>::quiet_NaN(), shard.options())},
                 1);
}

TEST(SeqToHead, EveryRankGetsAllTokensOfItsHeadsInOrder) {
  for (const Cut& cut : cuts()) {
    const HeadRanges heads = partition::head_ranges(cut.heads, cut.kv_heads, cut.world());
    const at::Tensor q = numbered(2, cut.seq_len(), cut.heads, 3, 1),
                     v = numbered(2, cut.seq_len(), cut.kv_heads, 5, 2);
    run_ranks(cut.world(), [&](int64_t rank, const GroupPtr& group) {
      const auto self = static_cast<size_t>(rank);
      const auto shard = [&](const at::Tensor& x) {
        return rows_with_padding(x.narrow(1, cut.begin(rank), cut.lengths[self]), 2);
      };
      const HeadBuffer buffer =
          seq_to_head({{shard(q), &heads.query}, {shard(v), &heads.kv}}, cut.lengths, Group(group));
      ASSERT_EQ(buffer.views.size(), 2U);
      EXPECT_TRUE(at::equal(buffer.views[0], q.narrow(2, heads.query[self].begin, heads.query[self].size())));
      EXPECT_TRUE(at::equal(buffer.views[1], v.narrow(2, heads.kv[self].begin, heads.kv[self].size())));
      // Nothing is unpacked: both are windows into what arrived.
      for (const at::Tensor& view : buffer.views) EXPECT_TRUE(view.is_alias_of(buffer.rows));
    });
  }
}

TEST(HeadToSeq, TakesSeqToHeadBackAndSumsHeadsThatSeveralRanksHold) {
  for (const Cut& cut : cuts()) {
    const HeadRanges heads = partition::head_ranges(cut.heads, cut.kv_heads, cut.world());
    const at::Tensor q = numbered(2, cut.seq_len(), cut.heads, 3, 1),
                     k = numbered(2, cut.seq_len(), cut.kv_heads, 5, 2);
    at::Tensor holders = at::zeros({cut.kv_heads, 1}, at::kDouble);  // ranks that hold each KV head
    for (const auto& range : heads.kv) holders.narrow(0, range.begin, std::max<int64_t>(0, range.size())).add_(1.0);
    run_ranks(cut.world(), [&](int64_t rank, const GroupPtr& group) {
      const auto self = static_cast<size_t>(rank);
      const int64_t length = cut.lengths[self], begin = cut.begin(rank);
      const auto own = [](const at::Tensor& x, const partition::Range& range) {
        return x.narrow(2, range.begin, range.size());
      };
      const auto shards = head_to_seq(
          {{own(q, heads.query[self]), &heads.query, cut.heads}, {own(k, heads.kv[self]), &heads.kv, cut.kv_heads}},
          cut.lengths, length + 2, Group(group));
      ASSERT_EQ(shards.size(), 2U);
      EXPECT_TRUE(at::equal(shards[0].narrow(1, 0, length), q.narrow(1, begin, length)));
      EXPECT_TRUE(at::equal(shards[1].narrow(1, 0, length), k.narrow(1, begin, length) * holders));
      for (const at::Tensor& shard : shards) {
        EXPECT_TRUE(shard.is_contiguous());
        EXPECT_EQ(max_abs(shard.narrow(1, length, 2)), 0.0);
      }
    });
  }
}

// 256 + 1 + 1 in bfloat16 steps is 256; the exact sum, 258, is a bfloat16.
TEST(HeadToSeq, SumsSixteenBitInFloat32) {
  const HeadRanges heads = partition::head_ranges(3, 1, 3);
  run_ranks(3, [&](int64_t rank, const GroupPtr& group) {
    const at::Tensor part = at::full({1, 3, 1, 1}, rank == 0 ? 256.0 : 1.0, at::kBFloat16);
    const auto sum = head_to_seq({{part, &heads.kv, 1}}, {1, 1, 1}, 1, Group(group));
    EXPECT_EQ(sum[0].item<float>(), 258.0F);
    EXPECT_EQ(sum_tokens(part.view({3, 1}), {1, 1, 1}, Group(group)).item<float>(), 258.0F);
  });
}

TEST(TokenRows, PutsTensorsOfAnyStridesSideBySide) {
  const at::Tensor a = numbered(2, 3, 4, 2, 1),
                   b = numbered(2, 3, 1, 5, 2).transpose(2, 3).contiguous().transpose(2, 3);
  const at::Tensor rows = token_rows({a, b});
  ASSERT_EQ(rows.sizes(), (std::vector<int64_t>{3, 2, 13}));
  EXPECT_TRUE(at::equal(head_slice(rows, 0, 4, 2), a.transpose(0, 1)));
  EXPECT_TRUE(at::equal(head_slice(rows, 8, 1, 5), b.transpose(0, 1)));
  const at::Tensor token_major = at::ones({3, 2, 4, 5}).transpose(0, 1);
  EXPECT_EQ(token_rows({token_major}).const_data_ptr(), token_major.const_data_ptr());
}

TEST(GatherTokens, AndItsTransposeSumTokens) {
  for (const Cut& cut : cuts()) {
    const int64_t seq_len = cut.seq_len();
    const at::Tensor all = at::arange(seq_len * 6, at::kDouble).view({seq_len, 2, 3});
    run_ranks(cut.world(), [&](int64_t rank, const GroupPtr& process_group) {
      const Group group(process_group);
      const at::Tensor local = all.narrow(0, cut.begin(rank), cut.lengths[static_cast<size_t>(rank)]);
      EXPECT_TRUE(at::equal(gather_tokens(local.contiguous(), cut.lengths, group), all));
      // Rank r contributes (r + 1) · all: the sum is W (W + 1) / 2 times the own rows.
      const auto world = static_cast<double>(cut.world());
      const at::Tensor partial = all * static_cast<double>(rank + 1);
      EXPECT_TRUE(at::equal(sum_tokens(partial, cut.lengths, group), local * (world * (world + 1) / 2)));
    });
  }
}

TEST(GatherSequence, LeavesPaddingOutAndGivesTheGradientThatWasAskedFor) {
  const std::vector<int64_t> lengths = {3, 0, 2};
  const at::Tensor all = at::arange(2 * 5 * 3, at::kDouble).view({2, 5, 3});
  run_ranks(3, [&](int64_t rank, const GroupPtr& process_group) {
    const Group group(process_group);
    const int64_t length = lengths[static_cast<size_t>(rank)], begin = rank == 0 ? 0 : 3;
    for (const int64_t dim : {1, 2}) {  // sequence in the middle, and last with other strides
      const at::Tensor sequence = dim == 1 ? all : all.transpose(1, 2);
      at::Tensor local = at::full({2, 4, 3}, -1.0, at::kDouble).transpose(1, dim);
      local.narrow(dim, 0, length).copy_(sequence.narrow(dim, begin, length));
      const at::Tensor gathered = gather_sequence(local, lengths, dim, group);
      EXPECT_TRUE(gathered.is_contiguous());
      EXPECT_TRUE(at::equal(gathered, sequence));
      const at::Tensor grad = sequence * static_cast<double>(rank + 1);
      for (const GatherGrad mode : {GatherGrad::kSum, GatherGrad::kSlice}) {
        const at::Tensor own = gather_sequence_backward(grad, lengths, 4, dim, mode, group);
        const double factor = mode == GatherGrad::kSum ? 6.0 : static_cast<double>(rank + 1);
        EXPECT_TRUE(at::equal(own.narrow(dim, 0, length), sequence.narrow(dim, begin, length) * factor));
        EXPECT_EQ(max_abs(own.narrow(dim, length, 4 - length)), 0.0);
      }
    }
  });
}

// Reports from a group that says it is not free, so that "auto" remembers; counts what passes.
struct NotFree {
  explicit NotFree(const GroupPtr& inner) : recorder(std::make_shared<Recorder>()) {
    const auto recorded = transports::record_group(inner, recorder);
    process_group = c10::make_intrusive<c10d::ProcessGroup>(inner->getRank(), inner->getSize());
    const c10::intrusive_ptr<c10d::Backend> backend =
        c10::make_intrusive<Renamed>(recorded->getBackend(c10::DeviceType::CPU));
    process_group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  size_t collectives() const { return recorder->records().size(); }

  struct Renamed final : c10d::Backend {
    explicit Renamed(c10::intrusive_ptr<c10d::Backend> backend)
        : Backend(backend->getRank(), backend->getSize()), inner(std::move(backend)) {}
    const std::string getBackendName() const override { return "slow"; }
    c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) override {
      return inner->_allgather_base(output, input, options);
    }
    c10::intrusive_ptr<c10d::Backend> inner;
  };
  std::shared_ptr<Recorder> recorder;
  GroupPtr process_group;
};

TEST(Agreement, AutoComparesATextOnceWhereComparingCosts) {
  run_ranks(2, [](int64_t rank, const GroupPtr& inner) {
    const NotFree slow(inner);
    const Group group(slow.process_group);
    const auto compare = [&](const std::string& text, AgreementMode mode, bool numbers_needed = false) {
      return agree(group, {.text = text, .mode = mode, .numbers = {rank}, .numbers_needed = numbers_needed});
    };
    const Agreement first = compare("a", AgreementMode::kAuto);
    EXPECT_TRUE(first.compared && first.texts.empty());
    EXPECT_EQ(first.numbers, (std::vector<std::vector<int64_t>>{{0}, {1}}));
    EXPECT_EQ(slow.collectives(), 1U);
    EXPECT_FALSE(compare("a", AgreementMode::kAuto).compared);
    EXPECT_FALSE(compare("b", AgreementMode::kOff).compared);
    EXPECT_EQ(slow.collectives(), 1U);
    EXPECT_TRUE(compare("b", AgreementMode::kAuto).compared);
    EXPECT_TRUE(compare("a", AgreementMode::kAlways).compared);
    EXPECT_TRUE(compare("a", AgreementMode::kAuto, /*numbers_needed=*/true).compared);
    EXPECT_EQ(slow.collectives(), 4U);
  });
}

TEST(Agreement, ADifferenceOrAFailedRankGivesEveryRankAllTexts) {
  run_ranks(3, [](int64_t rank, const GroupPtr& process_group) {
    const Group group(process_group);
    const std::vector<std::string> texts = {"x=1\n", "x=1\n", "x=22\n"};
    EXPECT_EQ(agree(group, {.text = texts[static_cast<size_t>(rank)]}).texts, texts);
    EXPECT_EQ(agree(group, {.text = "same", .failed = rank == 1}).texts,
              (std::vector<std::string>{"same", "same", "same"}));
    EXPECT_TRUE(agree(group, {.text = "same"}).texts.empty());  // usable afterwards
  });
}

TEST(Agreement, CP066_UnderCaptureNothingIsSentAndWhatWasAgreedIsKnown) {
  run_ranks(2, [](int64_t, const GroupPtr& inner) {
    const NotFree slow(inner);
    const Group group(slow.process_group);
    EXPECT_TRUE(agree(group, {.text = "new", .capturing = true}).impossible);
    EXPECT_EQ(slow.collectives(), 0U);
    EXPECT_TRUE(agree(group, {.text = "new"}).compared);
    EXPECT_FALSE(agree(group, {.text = "new", .capturing = true}).impossible);
    EXPECT_TRUE(agree(group, {.text = "new", .mode = AgreementMode::kAlways, .capturing = true}).impossible);
    EXPECT_FALSE(agree(group, {.text = "other", .mode = AgreementMode::kOff, .capturing = true}).impossible);
    EXPECT_EQ(slow.collectives(), 1U);
  });
}

TEST(Agreement, WordsOfTheOptionAndTheEnvironment) {
  ::unsetenv("ULYSSES_AGREEMENT");
  EXPECT_EQ(agreement_mode("auto"), AgreementMode::kAuto);
  EXPECT_EQ(agreement_mode("always"), AgreementMode::kAlways);
  EXPECT_EQ(agreement_mode("off"), AgreementMode::kOff);
  EXPECT_EQ(agreement_mode("sometimes"), std::nullopt);
  ::setenv("ULYSSES_AGREEMENT", "always", 1);
  EXPECT_EQ(agreement_mode("auto"), AgreementMode::kAlways);
  EXPECT_EQ(agreement_mode("off"), AgreementMode::kOff);
  ::unsetenv("ULYSSES_AGREEMENT");
}

}  // namespace
}  // namespace ulysses::exchange
