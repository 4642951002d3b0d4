#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "rule_cases.h"

namespace ulysses::contract {
namespace {

std::vector<Case> policy_and_length_cases() {
  return {
      {"CP001",
       CHANGE(s.policy.backend_name = "ulises"),
       "backend_name=\"ulises\" is unknown",
       {{"backend_name=\"ulysses\"", CHANGE(s.policy.backend_name = "ulysses")},
        {" or backend_name=\"allgather_kv\"", CHANGE(s.policy.backend_name = "allgather_kv")}}},
      {"CP002",
       CHANGE(s.policy.base_processor = "X"),
       "base_processor=\"X\" is not UlyssesAttentionProcessor",
       {{"base_processor=\"UlyssesAttentionProcessor\"",
         CHANGE(s.policy.base_processor = "UlyssesAttentionProcessor")}}},
      {"CP003",
       CHANGE(s.policy.required_checks.pop_back()),
       "required_checks lacks output_restore_dim",
       {{"required_checks=(\"seq_divisible\", \"kv_global_gathered\", \"output_restore_dim\")",
         CHANGE(s.policy.required_checks = {"seq_divisible", "kv_global_gathered", "output_restore_dim"})}}},
      {"CP004",
       CHANGE(s.policy.kv_must_be_global = false),
       "kv_must_be_global=False is not offered",
       {{"kv_must_be_global=True", CHANGE(s.policy.kv_must_be_global = true)}}},
      {"CP005",
       CHANGE(s.policy.output_restore_dim = 2),
       "output_restore_dim=2 is not the sequence dimension of qkv_format=\"bshd\"",
       {{"output_restore_dim=1", CHANGE(s.policy.output_restore_dim = 1)}}},
      {"CP005",
       CHANGE(s.policy.output_restore_dim = -3),
       "output_restore_dim=-3 is the sequence dimension of no qkv_format",
       {{"output_restore_dim=1", CHANGE(s.policy.output_restore_dim = 1)}}},
      {"CP005",
       CHANGE(s.qkv_format = "bhsd"),
       "output_restore_dim=1 is not the sequence dimension of qkv_format=\"bhsd\"",
       {{"output_restore_dim=2", CHANGE(s.policy.output_restore_dim = 2)}}},
      {"CP005",
       CHANGE(s.qkv_format = "sbhd"),
       "output_restore_dim=1 is not the sequence dimension of qkv_format=\"sbhd\"",
       {{"output_restore_dim=0", CHANGE(s.policy.output_restore_dim = 0)}}},
      {"CP006",
       CHANGE(s.policy.pad_multiple = 0),
       "pad_multiple=0 is not positive",
       {{"pad_multiple=1 or more", CHANGE(s.policy.pad_multiple = 1)}}},
      {"CP010",
       CHANGE(s.policy.auto_pad = false; set_layout(s, {752, 752, 752, 745}, {752, 752, 752, 752})),
       "seq_len=3001 is not divisible by cp_size=4",
       {{"pad to 3008 (752 per rank)", CHANGE(set_layout(s, {752, 752, 752, 752}, {752, 752, 752, 752}))},
        {", or auto_pad=True", CHANGE(s.policy.auto_pad = true)},
        {", or require_seq_divisible=False", CHANGE(s.policy.require_seq_divisible = false)}}},
      {"CP011",
       CHANGE(s.policy.auto_pad = false; set_layout(s, {752, 752, 752, 744}, {752, 752, 752, 752})),
       "seq_len=3000 divides by cp_size=4 but not by cp_size*pad_multiple=4*8=32",
       {{"pad to 3008 (752 per rank)", CHANGE(set_layout(s, {752, 752, 752, 752}, {752, 752, 752, 752}))},
        {", or auto_pad=True", CHANGE(s.policy.auto_pad = true)},
        {", or pad_multiple=1 (750 per rank)", CHANGE(s.policy.pad_multiple = 1)},
        {", or require_seq_divisible=False", CHANGE(s.policy.require_seq_divisible = false)}}},
      {"CP011",
       CHANGE(s.policy.auto_pad = false; for (auto* t
                                              : {&s.q, &s.k, &s.v}) set_rows(*t, 750)),
       "q has S_local=750 rows, not a multiple of pad_multiple=8",
       {{"a seq_len of 3008 (752 per rank)", CHANGE(for (auto* t
                                                         : {&s.q, &s.k, &s.v}) set_rows(*t, 752))},
        {", or auto_pad=True", CHANGE(s.policy.auto_pad = true)},
        {", or pad_multiple=1", CHANGE(s.policy.pad_multiple = 1)},
        {", or require_seq_divisible=False", CHANGE(s.policy.require_seq_divisible = false)}}},
      {"CP012",
       CHANGE(set_layout(s, {752, 752, 752, 744}, {752, 752, 752, 752}); set_rows(s.q, 700)),
       "q has S_local=700 rows, layout.padded_lengths[0]=752",
       {{"q with 752 rows, as layout.shard(x, rank=0) cuts them", CHANGE(set_rows(s.q, 752))}}},
      {"CP012",
       CHANGE(set_layout(s, {752, 752, 752, 744}, {752, 752, 752, 752}); set_rows(s.k, 77); set_rows(s.v, 77)),
       "k has S_local=77 rows, layout.padded_lengths[0]=752",
       {{"k with 752 rows, as layout.shard(x, rank=0) cuts them", CHANGE(set_rows(s.k, 752); set_rows(s.v, 752))},
        {", or a kv_layout= in which rank 0 has 77 rows",
         CHANGE(s.kv_layout = LayoutSpec{{77, 77, 77, 77}, {77, 77, 77, 77}, {}})}}},
      {"CP012",
       CHANGE(set_layout(s, {752, -1, 0, 0}, {752, 0, 0, 0})),
       "layout.lengths=[752, -1, 0, 0] holds a negative length",
       {{"lengths like [752, 0, 0, 0]", CHANGE(set_layout(s, {752, 0, 0, 0}, {752, 0, 0, 0}))}}},
      {"CP012",
       CHANGE(set_layout(s, {752, 1, 1, 1}, {752, 1, 0, 1})),
       "layout.padded_lengths=[752, 1, 0, 1] cannot hold layout.lengths=[752, 1, 1, 1]",
       {{"layout=SequenceLayout.from_lengths([752, 1, 1, 1])", CHANGE(set_layout(s, {752, 1, 1, 1}, {752, 1, 1, 1}))}}},
      {"CP014",
       CHANGE(set_layout(s, {1504, 1504}, {1504, 1504})),
       "layout.cp_size=2 but the group has cp_size=4",
       {{"layout=SequenceLayout(3008, cp_size=4)", CHANGE(set_layout(s, {752, 752, 752, 752}, {752, 752, 752, 752}))},
        {", or a cp_group of 2 ranks", CHANGE(s.cp_size = 2; for (auto* t
                                                                  : {&s.q, &s.k, &s.v}) set_rows(*t, 1504))}}},
      {"CP015",
       CHANGE(set_layout(s, {752, 752, 752, 752}, {752, 752, 752, 752}); s.layout->cp_rank = 1),
       "layout.cp_rank=1 but the caller is rank 0 of the group, cp_size=4",
       {{"the cp_group in which this process is rank 1", CHANGE(s.cp_rank = 1)},
        {", or layout with cp_rank=0", CHANGE(s.layout->cp_rank = 0)}}},
  };
}

std::vector<Case> tensor_cases() {
  return {
      {"CP020",
       CHANGE(s.k.sizes = {752, 2, 16}),
       "k has 3 dimensions, sizes [752, 2, 16]",
       {{"k.unsqueeze(0) of shape [1, 752, 2, 16] as [B, S_local, H_kv, D]",
         CHANGE(s.k.sizes = {1, 752, 2, 16}; s.q.sizes[0] = s.v.sizes[0] = 1)}}},
      {"CP021",
       CHANGE(s.q.dtype = "int64"; s.q.is_floating = false; s.v.dtype = "bfloat16"),
       "q.dtype=int64, k.dtype=float32, v.dtype=bfloat16",
       {{"q.to(torch.float32), v.to(torch.float32)",
         CHANGE(s.q.is_floating = true; s.q.dtype = s.v.dtype = "float32")}}},
      {"CP022",
       CHANGE(s.q.device = "xpu:0"; s.k.device = "cuda:1"),
       "q.device=xpu:0, k.device=cuda:1, v.device=cpu",
       {{"q.to(\"cuda:1\"), v.to(\"cuda:1\")", CHANGE(s.q.device = s.v.device = "cuda:1")}}},
      {"CP023",
       CHANGE(s.q.sizes[2] = 7),
       "H=7 query heads cannot share H_kv=2 key/value heads",
       {{"H_kv one of 1, 7", CHANGE(s.k.sizes[2] = s.v.sizes[2] = 7)},
        {", or H one of 6, 8", CHANGE(s.q.sizes[2] = 8)}}},
      {"CP024",
       CHANGE(s.v.sizes[1] = 750),
       "v has S_local=750, k has S_local=752 (dim 1)",
       {{"v with S_local=752", CHANGE(s.v.sizes[1] = 752)}}},
      {"CP024",
       CHANGE(s.v.sizes[2] = 1),
       "v has H_kv=1, k has H_kv=2 (dim 2)",
       {{"v with H_kv=2", CHANGE(s.v.sizes[2] = 2)}}},
      {"CP024", CHANGE(s.v.sizes[0] = 1), "v has B=1, k has B=2 (dim 0)", {{"v with B=2", CHANGE(s.v.sizes[0] = 2)}}},
      {"CP024", CHANGE(s.q.sizes[3] = 8), "k has D=16, q has D=8 (dim 3)", {{"k with D=8", CHANGE(s.k.sizes[3] = 8)}}},
      {"CP024", CHANGE(s.v.sizes[3] = 0), "v has D_v=0 (dim 3)", {{"D_v=1 or more", CHANGE(s.v.sizes[3] = 1)}}},
  };
}

std::vector<Case> option_cases() {
  return {
      {"CP025",
       CHANGE(s.softmax_scale = std::numeric_limits<double>::infinity()),
       "softmax_scale=inf is not finite",
       {{"softmax_scale=None (1/sqrt(D) = 0.25)", CHANGE(s.softmax_scale.reset())}}},
      {"CP026",
       CHANGE(s.requested_cp_size = 2),
       "cp_size=2 but the group has 4 ranks",
       {{"cp_size=4", CHANGE(s.requested_cp_size = 4)}, {", or cp_size=None", CHANGE(s.requested_cp_size.reset())}}},
      {"CP030",
       CHANGE(s.strategy = "allgather"),
       "strategy=\"allgather\" is unknown",
       {{"strategy=\"allgather_kv\"", CHANGE(s.strategy = "allgather_kv")},
        {" or strategy=\"ulysses\"", CHANGE(s.strategy = "ulysses")}}},
      {"CP031",
       CHANGE(s.kernel = "maths"),
       "kernel=\"maths\" is unknown",
       {{"kernel=\"math\"", CHANGE(s.kernel = "math")}, {" or kernel=\"auto\"", CHANGE(s.kernel = "auto")}}},
      {"CP033",
       CHANGE(s.agreement = "of"),
       "agreement=\"of\" is unknown",
       {{"agreement=\"off\"", CHANGE(s.agreement = "off")},
        {" or agreement=\"auto\"", CHANGE(s.agreement = "auto")},
        {" or agreement=\"always\"", CHANGE(s.agreement = "always")}}},
      {"CP041",
       CHANGE(s.requested = {Feature::kWindow}),
       "window is not offered by strategy=\"ulysses\"",
       {{"window=None (full attention)", CHANGE(s.requested.clear())}}},
      {"CP042",
       CHANGE(s.requested = {Feature::kDropout}),
       "dropout is not offered by strategy=\"ulysses\"",
       {{"dropout_p=0.0 and dropout_seed=None", CHANGE(s.requested.clear())}}},
      {"CP045",
       CHANGE(s.requested = {Feature::kPackedSequences}),
       "packed_sequences is not offered by strategy=\"ulysses\"",
       {{"cu_seqlens_q=None and cu_seqlens_kv=None, with one call per sequence", CHANGE(s.requested.clear())}}},
      {"CP047",
       CHANGE(s.requested = {Feature::kHybridDegree}),
       "hybrid_degree is not offered by strategy=\"ulysses\"",
       {{"ulysses_degree=None and outer=\"ring\" with a 1-D group", CHANGE(s.requested.clear())}}},
      {"CP047",
       CHANGE(s.outer = "allgather_kv"),
       "hybrid_degree is not offered by strategy=\"ulysses\"",
       {{"ulysses_degree=None and outer=\"ring\" with a 1-D group", CHANGE(s.outer = "ring")}}},
      {"CP048",
       CHANGE(s.causal_alignment = "bottom_right"),
       "bottom_right_causal is not offered by strategy=\"ulysses\"",
       {{"causal_alignment=\"top_left\"", CHANGE(s.causal_alignment = "top_left")}}},
      {"CP049",
       CHANGE(set_layout(s, {752, 752, 752, 752}, {752, 752, 752, 752}); s.layout->order = "head_tail"),
       "head_tail_order is not offered by strategy=\"ulysses\"",
       {{"a layout with order=\"contiguous\"", CHANGE(s.layout->order = "contiguous")}}},
  };
}

std::string declare(std::string_view field) {
  return base::cat(", or \"", field, "\" in the backend's supports once attend() honours it");
}

std::vector<Case> backend_cases() {
  return {
      {"CP050",
       CHANGE(s.backend_supports = {"softmax_scale"}; s.is_causal = true),
       "this backend does not declare is_causal",
       {{"is_causal=False", CHANGE(s.is_causal = false)},
        {declare("is_causal"), CHANGE(s.backend_supports.emplace_back("is_causal"))}}},
      {"CP050",
       CHANGE(s.backend_supports.clear(); s.softmax_scale = 0.5),
       "this backend does not declare softmax_scale",
       {{"softmax_scale=None", CHANGE(s.softmax_scale.reset())},
        {declare("softmax_scale"), CHANGE(s.backend_supports.emplace_back("softmax_scale"))}}},
      {"CP050",
       CHANGE(s.backend_supports = {"is_causal"}; s.is_causal = true; s.strategy = "allgather_kv"),
       "this backend does not declare q_positions",
       {{"strategy=\"ulysses\"", CHANGE(s.strategy = "ulysses")},
        {declare("q_positions"), CHANGE(s.backend_supports.emplace_back("q_positions"))}}},
      {"CP050",
       CHANGE(s.backend_supports = {"is_causal"}; s.return_lse = true),
       "this backend does not declare need_lse",
       {{"return_lse=False", CHANGE(s.return_lse = false)},
        {declare("need_lse"), CHANGE(s.backend_supports.emplace_back("need_lse"))}}},
  };
}

TEST(CheckAttention, ALegalCallHasNoProblem) { EXPECT_EQ(ids(check_attention(legal())), Ids{}); }
TEST(CheckAttention, PolicyAndLengthsCP001ToCP015) { run_cases(policy_and_length_cases()); }
TEST(CheckAttention, TensorsCP020ToCP024) { run_cases(tensor_cases()); }
TEST(CheckAttention, OptionsCP025ToCP049) { run_cases(option_cases()); }
TEST(CheckAttention, BackendDeclaresCP050) { run_cases(backend_cases()); }

TEST(CheckAttention, SizesOfTheGroupCP006CP015) {
  AttentionSpec spec = legal();
  spec.cp_size = 0;
  EXPECT_EQ(ids(check_attention(spec)), Ids{"CP006"});
  spec.cp_size = 4;
  spec.cp_rank = 4;
  EXPECT_EQ(ids(check_attention(spec)), Ids{"CP015"});
}

TEST(CheckAttention, StrictLengthBeyond64BitsCP007) {
  AttentionSpec spec = legal();
  spec.policy.auto_pad = false;
  spec.policy.pad_multiple = std::numeric_limits<int64_t>::max() / 2;
  set_layout(spec, {752, 752, 752, 752}, {752, 752, 752, 752});
  const auto problems = check_attention(spec);
  ASSERT_EQ(ids(problems), Ids{"CP007"});
  EXPECT_EQ(problems[0].fix, "pad_multiple=1, or require_seq_divisible=False");
  spec.policy.pad_multiple = 1;
  EXPECT_EQ(ids(check_attention(spec)), Ids{});
}

TEST(CheckAttention, EveryWordIsCheckedCP033) {
  AttentionSpec spec = legal();
  set_layout(spec, {752, 752, 752, 752}, {752, 752, 752, 752});
  spec.agreement = spec.qkv_format = spec.kv_role = spec.causal_alignment = spec.outer = spec.layout->order =
      spec.joint_position = "x";
  EXPECT_EQ(ids(check_attention(spec)), Ids(7, "CP033"));
}

TEST(CheckAttention, PadModeTakesAnyEqualLocalLengthWithoutALayout) {
  for (const int64_t rows : {0, 1, 7, 750}) {
    AttentionSpec spec = legal();
    for (TensorSpec* tensor : {&spec.q, &spec.k, &spec.v}) set_rows(*tensor, rows);
    EXPECT_EQ(ids(check_attention(spec)), Ids{}) << rows;
  }
}

TEST(CheckAttention, ReportsAllFailedRulesInTheOrderOfIds) {
  AttentionSpec spec = legal();
  spec.is_causal = true;
  spec.backend_supports.clear();
  spec.strategy = "none";
  spec.policy.backend_name = "none";
  spec.q.sizes[2] = 5;
  spec.v.dtype = "float16";
  spec.requested = {Feature::kDropout};  // undecidable without a strategy
  EXPECT_EQ(ids(check_attention(spec)), (Ids{"CP001", "CP021", "CP023", "CP030", "CP050"}));
  spec.strategy = "ulysses";
  spec.requested = {Feature::kWindow};
  spec.attn_mask = TensorSpec{.sizes = {2, 1, 1, 5}, .dtype = "int64", .device = "cpu", .is_floating = false};
  spec.causal_alignment = "bottom_right";
  EXPECT_EQ(ids(check_attention(spec)),
            (Ids{"CP001", "CP021", "CP023", "CP027", "CP027", "CP041", "CP048", "CP050", "CP050"}));
}

TEST(CheckAttention, AnyGarbageIsSafe) {
  constexpr int64_t kMin = INT64_MIN, kMax = INT64_MAX;
  const std::vector<std::vector<int64_t>> shapes = {{},
                                                    {0},
                                                    {0, 0, 0, 0},
                                                    {-1, -1, -1, -1},
                                                    {kMin, 1, kMax, 1},
                                                    {1, kMax, kMax, 0},
                                                    {1, 2, 3, 4, 5},
                                                    {1, 1, kMax, 1}};
  for (const auto& q : shapes) {
    for (const auto& k : shapes) {
      for (const int64_t number : {kMin, int64_t{-1}, int64_t{0}, int64_t{3}, kMax}) {
        AttentionSpec spec;
        spec.q.sizes = q;
        spec.k.sizes = k;
        spec.v.sizes = q;
        spec.cp_size = spec.cp_rank = spec.policy.pad_multiple = number;
        spec.policy.auto_pad = false;
        set_layout(spec, {number, kMax}, {number});
        spec.kv_layout = LayoutSpec{};
        EXPECT_FALSE(check_attention(spec).empty());
        spec.attn_mask = TensorSpec{.sizes = k, .dtype = "bool", .device = "cpu", .is_floating = false};
        spec.sinks = TensorSpec{.sizes = k, .dtype = "float32", .device = "cpu"};
        spec.joint_len = number;
        spec.joint_valid_lens = {number};
        EXPECT_FALSE(check_attention(spec).empty());
        spec.layout.reset();
        EXPECT_FALSE(check_attention(spec).empty());
        spec.kv_layout.reset();
        spec.policy.require_seq_divisible = !spec.policy.require_seq_divisible;
        EXPECT_FALSE(check_attention(spec).empty());
      }
    }
  }
}

}  // namespace
}  // namespace ulysses::contract
