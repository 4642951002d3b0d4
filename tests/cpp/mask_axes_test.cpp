#include "rule_cases.h"

namespace ulysses::contract {
namespace {

constexpr MaskAxis kBroadcast = MaskAxis::kBroadcast, kLocal = MaskAxis::kLocal, kGlobal = MaskAxis::kGlobal;

// A call on one rank of a group whose ranks hold `rows` rows, `tokens` of them real.
AttentionSpec call(const std::vector<int64_t>& tokens, const std::vector<int64_t>& rows, int64_t rank) {
  AttentionSpec spec = legal();
  spec.cp_size = static_cast<int64_t>(tokens.size());
  spec.cp_rank = rank;
  set_layout(spec, tokens, rows);
  for (TensorSpec* tensor : {&spec.q, &spec.k, &spec.v}) set_rows(*tensor, rows[static_cast<size_t>(rank)]);
  return spec;
}

void set_mask(AttentionSpec& spec, std::vector<int64_t> sizes) {
  spec.attn_mask = TensorSpec{.sizes = std::move(sizes), .dtype = "bool", .device = "cpu", .is_floating = false};
}

// The axes of a mask that must be legal.
MaskAxes axes_of(AttentionSpec spec, std::vector<int64_t> sizes, std::string q = "", std::string kv = "") {
  set_mask(spec, std::move(sizes));
  spec.mask_q = std::move(q);
  spec.mask_kv = std::move(kv);
  EXPECT_EQ(ids(check_attention(spec)), Ids{}) << base::join(spec.attn_mask->sizes);
  return mask_axes(spec);
}

Ids ids_of(AttentionSpec spec, std::vector<int64_t> sizes) {
  set_mask(spec, std::move(sizes));
  return ids(check_attention(spec));
}

TEST(MaskAxes, BySizeWhereOneReadingIsPossible) {
  const AttentionSpec spec = call({10, 7}, {10, 7}, 1);
  EXPECT_EQ(axes_of(spec, {2, 17}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 7}), (MaskAxes{kBroadcast, kLocal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 1, 17}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 1, 7}), (MaskAxes{kBroadcast, kLocal}));
  EXPECT_EQ(axes_of(spec, {2, 6, 7, 17}), (MaskAxes{kLocal, kGlobal}));
  EXPECT_EQ(axes_of(spec, {1, 1, 17, 7}), (MaskAxes{kGlobal, kLocal}));
  EXPECT_EQ(axes_of(spec, {1, 6, 17, 17}), (MaskAxes{kGlobal, kGlobal}));
  EXPECT_EQ(ids_of(spec, {1, 1, 10, 17}), Ids{"CP027"}) << "the rows of the other rank";
}

TEST(MaskAxes, LocalAxesCountPaddingRowsAndGlobalOnesDoNot) {
  const AttentionSpec spec = call({8, 5}, {8, 8}, 1);
  EXPECT_EQ(axes_of(spec, {2, 8}), (MaskAxes{kBroadcast, kLocal}));
  EXPECT_EQ(axes_of(spec, {2, 13}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(ids_of(spec, {2, 5}), Ids{"CP027"}) << "the rank's real rows";
  EXPECT_EQ(ids_of(spec, {2, 16}), Ids{"CP027"}) << "the rows of all ranks with their padding";
}

TEST(MaskAxes, ADeclarationDecidesBetweenTwo) {
  const AttentionSpec spec = call({5, 3}, {8, 8}, 0);
  EXPECT_EQ(ids_of(spec, {2, 8}), Ids{"CP028"});
  EXPECT_EQ(axes_of(spec, {2, 8}, "", "local"), (MaskAxes{kBroadcast, kLocal}));
  EXPECT_EQ(axes_of(spec, {2, 8}, "", "global"), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(ids_of(spec, {2, 1, 8, 8}), (Ids{"CP028", "CP028"}));
  EXPECT_EQ(axes_of(spec, {2, 1, 8, 8}, "local", "global"), (MaskAxes{kLocal, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 8, 8}, "global", "local"), (MaskAxes{kGlobal, kLocal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 8, 8}, "global", "global"), (MaskAxes{kGlobal, kGlobal}));
}

// Of two readings one may hold everything: rank 0 has all tokens, so its rows are the sequence.
TEST(MaskAxes, ARankThatHoldsEverythingMustSayWhichItMeans) {
  EXPECT_EQ(ids_of(call({8, 0}, {8, 0}, 0), {2, 8}), Ids{"CP028"});
  EXPECT_EQ(axes_of(call({8, 0}, {8, 0}, 1), {2, 8}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(call({8, 0}, {8, 0}, 1), {2, 0}), (MaskAxes{kBroadcast, kLocal}));
}

TEST(MaskAxes, OneRowRanks) {
  const AttentionSpec spec = call({1, 1, 1}, {1, 1, 1}, 2);
  EXPECT_EQ(ids_of(spec, {2, 1, 1, 3}), Ids{"CP028"});
  EXPECT_EQ(axes_of(spec, {2, 1, 1, 3}, "local"), (MaskAxes{kLocal, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 1, 3}, "broadcast"), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 3, 3}), (MaskAxes{kGlobal, kGlobal}));
  EXPECT_EQ(ids_of(spec, {2, 3}), Ids{}) << "a 2-D mask has no query axis";
}

TEST(MaskAxes, OneTokenInAllIsTheSameInEveryReading) {
  const AttentionSpec spec = call({1}, {1}, 0);
  EXPECT_EQ(axes_of(spec, {2, 1, 1, 1}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 1}), (MaskAxes{kBroadcast, kGlobal}));
}

TEST(MaskAxes, InAGroupOfOneLocalAndGlobalDifferByPaddingAlone) {
  EXPECT_EQ(axes_of(call({8}, {8}, 0), {2, 6, 8, 8}), (MaskAxes{kGlobal, kGlobal}));
  const AttentionSpec padded = call({5}, {8}, 0);
  EXPECT_EQ(axes_of(padded, {2, 6, 8, 8}), (MaskAxes{kLocal, kLocal})) << "nobody else's keys are missing";
  EXPECT_EQ(axes_of(padded, {2, 6, 5, 5}), (MaskAxes{kGlobal, kGlobal}));
  AttentionSpec uneven = call({8}, {8}, 0);
  uneven.layout.reset();
  uneven.policy.require_seq_divisible = false;
  EXPECT_EQ(axes_of(uneven, {2, 8}), (MaskAxes{kBroadcast, kGlobal}));
}

TEST(MaskAxes, JointTokensMakeEveryAxisGlobal) {
  for (const char* position : {"prefix", "suffix"}) {
    AttentionSpec spec = call({10, 7}, {10, 8}, 1);
    spec.joint_len = 4;
    spec.joint_position = position;
    for (TensorSpec* tensor : {&spec.q, &spec.k, &spec.v}) tensor->sizes[1] += 4;
    EXPECT_EQ(axes_of(spec, {2, 21}), (MaskAxes{kBroadcast, kGlobal}));
    EXPECT_EQ(axes_of(spec, {2, 6, 21, 21}), (MaskAxes{kGlobal, kGlobal}));
    for (const int64_t size : {7, 8, 11, 12, 17}) EXPECT_EQ(ids_of(spec, {2, size}), Ids{"CP027"}) << size;
  }
}

TEST(MaskAxes, ReplicatedKeysAreGlobalAndQueriesAreAsEver) {
  AttentionSpec spec = call({10, 7}, {10, 7}, 1);
  spec.kv_role = "replicated";
  spec.kv_layout.reset();
  set_rows(spec.k, 5);
  set_rows(spec.v, 5);
  EXPECT_EQ(axes_of(spec, {2, 5}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 6, 7, 5}), (MaskAxes{kLocal, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 6, 17, 5}), (MaskAxes{kGlobal, kGlobal}));
  EXPECT_EQ(ids_of(spec, {2, 17}), Ids{"CP027"});
}

TEST(MaskAxes, KeysOfAnotherLayout) {
  AttentionSpec spec = call({10, 7}, {10, 7}, 1);
  spec.kv_layout = LayoutSpec{{3, 2}, {3, 2}, {}};
  set_rows(spec.k, 2);
  set_rows(spec.v, 2);
  EXPECT_EQ(axes_of(spec, {2, 5}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 2}), (MaskAxes{kBroadcast, kLocal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 7, 5}), (MaskAxes{kLocal, kGlobal}));
}

TEST(MaskAxes, WithoutALayoutEqualShardsAreTheRule) {
  AttentionSpec spec = call({6, 6}, {6, 6}, 0);
  spec.layout.reset();
  EXPECT_EQ(axes_of(spec, {2, 12}), (MaskAxes{kBroadcast, kGlobal}));
  EXPECT_EQ(axes_of(spec, {2, 1, 6, 12}), (MaskAxes{kLocal, kGlobal}));
  spec.policy.require_seq_divisible = false;  // the other ranks may hold any number
  for (const int64_t size : {6, 12}) EXPECT_EQ(ids_of(spec, {2, size}), Ids{"CP028"});
}

TEST(MaskAxes, AreSafeOnCallsThatAreRefused) {
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{}, {0}, {1, 2, 3}, {-1, -1, -1, -1}}) {
    AttentionSpec spec = call({6, 6}, {6, 6}, 0);
    set_mask(spec, sizes);
    EXPECT_NO_FATAL_FAILURE(mask_axes(spec));
    spec.q.sizes = sizes;
    EXPECT_NO_FATAL_FAILURE(mask_axes(spec));
  }
}

}  // namespace
}  // namespace ulysses::contract
