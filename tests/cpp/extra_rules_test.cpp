#include <limits>

#include "rule_cases.h"

namespace ulysses::contract {
namespace {

void set_joint(AttentionSpec& spec, int64_t tokens) {
  spec.joint_len = tokens;
  for (TensorSpec* tensor : {&spec.q, &spec.k, &spec.v}) tensor->sizes[1] += tokens;
}

std::vector<Case> joint_cases() {
  return {
      {"CP029",
       CHANGE(s.joint_problem = "joint.k has shape [2, 5, 2, 8], not [2, 5, 2, 16], for k of shape [2, 752, 2, 16]"),
       "joint.k has shape [2, 5, 2, 8], not [2, 5, 2, 16], for k of shape [2, 752, 2, 16]",
       {{"JointTokens(q [B, T, H, D], k [B, T, H_kv, D], v [B, T, H_kv, D_v]) of one dtype and device, with "
         "valid_lens=None or B numbers",
         CHANGE(s.joint_problem.clear(); set_joint(s, 5))}}},
      {"CP029",
       CHANGE(s.joint_len = -1),
       "joint_len=-1 is negative",
       {{"joint_len=0 or more", CHANGE(s.joint_len = 0)}}},
      {"CP029",
       CHANGE(set_joint(s, 5); set_rows(s.q, 4)),
       "q has 4 rows and joint_len=5",
       {{"q with 5 rows more than the rank's own", CHANGE(set_rows(s.q, 757))}}},
      {"CP029",
       CHANGE(set_joint(s, 5); s.joint_valid_lens = {3, 6}),
       "joint.valid_lens=[3, 6] for B=2 sequences of T=5",
       {{"valid_lens with 2 numbers from 0 to 5", CHANGE(s.joint_valid_lens = {0, 5})},
        {", or valid_lens=None", CHANGE(s.joint_valid_lens.clear())}}},
      {"CP029",
       CHANGE(set_joint(s, 5); s.joint_valid_lens = {3}),
       "joint.valid_lens=[3] for B=2 sequences of T=5",
       {{"valid_lens with 2 numbers from 0 to 5", CHANGE(s.joint_valid_lens = {3, 4})},
        {", or valid_lens=None", CHANGE(s.joint_valid_lens.clear())}}},
      {"CP029",
       CHANGE(set_joint(s, 5); s.joint_valid_lens = {-1, 2}),
       "joint.valid_lens=[-1, 2] for B=2 sequences of T=5",
       {{"valid_lens with 2 numbers from 0 to 5", CHANGE(s.joint_valid_lens = {1, 2})},
        {", or valid_lens=None", CHANGE(s.joint_valid_lens.clear())}}},
      {"CP033",
       CHANGE(set_joint(s, 5); s.joint_position = "in_front"),
       "joint.position=\"in_front\" is unknown",
       {{"joint.position=\"prefix\"", CHANGE(s.joint_position = "prefix")},
        {" or joint.position=\"suffix\"", CHANGE(s.joint_position = "suffix")}}},
      {"CP043",
       CHANGE(set_joint(s, 5); s.kv_role = "replicated"),
       "joint= with kv_role=\"replicated\": both say which keys every rank holds",
       {{"the text's K and V in front of k and v, with kv_role=\"replicated\" and joint=None",
         CHANGE(s.joint_len = 0; set_rows(s.q, 752))}}},
      {"CP044",
       CHANGE(s.kv_role = "replicated"; s.kv_layout = LayoutSpec{{752, 752, 752, 752}, {752, 752, 752, 752}, {}}),
       "kv_layout with kv_role=\"replicated\"",
       {{"kv_layout=None", CHANGE(s.kv_layout.reset())}, {", or kv_role=\"sharded\"", CHANGE(s.kv_role = "sharded")}}},
      {"CP033",
       CHANGE(s.kv_role = "global"),
       "kv_role=\"global\" is unknown",
       {{"kv_role=\"sharded\"", CHANGE(s.kv_role = "sharded")},
        {" or kv_role=\"replicated\"", CHANGE(s.kv_role = "replicated")}}},
  };
}

TensorSpec sinks(std::vector<int64_t> sizes) {
  return {.sizes = std::move(sizes), .dtype = "float32", .device = "cpu"};
}

std::vector<Case> score_cases() {
  return {
      {"CP034",
       CHANGE(s.sinks = sinks({2})),
       "sinks has shape [2], dtype=float32, device=cpu",
       {{"sinks of shape [6], floating, on cpu", CHANGE(s.sinks = sinks({6}))}}},
      {"CP034",
       CHANGE(s.sinks_type = "list"),
       "sinks is a list, not a tensor",
       {{"a floating tensor of shape [H]", CHANGE(s.sinks_type.clear(); s.sinks = sinks({6}))},
        {", or sinks=None", CHANGE(s.sinks_type.clear())}}},
      {"CP034",
       CHANGE(s.sinks = sinks({1, 6})),
       "sinks has shape [1, 6], dtype=float32, device=cpu",
       {{"sinks of shape [6], floating, on cpu", CHANGE(s.sinks = sinks({6}))}}},
      {"CP034",
       CHANGE(s.sinks = sinks({6}); s.sinks->dtype = "int64"; s.sinks->is_floating = false),
       "sinks has shape [6], dtype=int64, device=cpu",
       {{"sinks of shape [6], floating, on cpu", CHANGE(s.sinks = sinks({6}); s.sinks->dtype = "bfloat16")}}},
      {"CP034",
       CHANGE(s.sinks = sinks({6}); s.sinks->device = "cuda:1"),
       "sinks has shape [6], dtype=float32, device=cuda:1",
       {{"sinks of shape [6], floating, on cpu", CHANGE(s.sinks = sinks({6}))}}},
      {"CP034",
       CHANGE(s.softcap = 0.0),
       "softcap=0",
       {{"softcap=50.0", CHANGE(s.softcap = 50.0)}, {", or softcap=None", CHANGE(s.softcap.reset())}}},
      {"CP034",
       CHANGE(s.softcap = -30.0),
       "softcap=-30",
       {{"softcap=50.0", CHANGE(s.softcap = 50.0)}, {", or softcap=None", CHANGE(s.softcap.reset())}}},
      {"CP034",
       CHANGE(s.softcap = std::numeric_limits<double>::infinity()),
       "softcap=inf",
       {{"softcap=50.0", CHANGE(s.softcap = 50.0)}, {", or softcap=None", CHANGE(s.softcap.reset())}}},
  };
}

std::string declare(std::string_view field) {
  return base::cat(", or \"", field, "\" in the backend's supports once attend() honours it");
}

std::vector<Case> backend_cases() {
  return {
      {"CP050",
       CHANGE(s.backend_supports.clear(); s.attn_mask = TensorSpec{{2, 3008}, "bool", "cpu", /*is_floating=*/false}),
       "this backend does not declare attn_mask",
       {{"attn_mask=None", CHANGE(s.attn_mask.reset())},
        {declare("attn_mask"), CHANGE(s.backend_supports.emplace_back("attn_mask"))}}},
      {"CP050",
       CHANGE(s.backend_supports = {"sinks"}; set_joint(s, 5); s.joint_valid_lens = {3, 4}),
       "this backend does not declare attn_mask",
       {{"joint.valid_lens=None", CHANGE(s.joint_valid_lens.clear())},
        {declare("attn_mask"), CHANGE(s.backend_supports.emplace_back("attn_mask"))}}},
      {"CP050",
       CHANGE(s.backend_supports = {"attn_mask"}; s.sinks = sinks({6})),
       "this backend does not declare sinks",
       {{"sinks=None", CHANGE(s.sinks.reset())}, {declare("sinks"), CHANGE(s.backend_supports.emplace_back("sinks"))}}},
      {"CP050",
       CHANGE(s.backend_supports = {"sinks"}; s.softcap = 30.0),
       "this backend does not declare softcap",
       {{"softcap=None", CHANGE(s.softcap.reset())},
        {declare("softcap"), CHANGE(s.backend_supports.emplace_back("softcap"))}}},
  };
}

TEST(ExtraRules, JointTokensAndReplicatedKeysCP029CP043CP044) { run_cases(joint_cases()); }
TEST(ExtraRules, SinksAndSoftcapCP034) { run_cases(score_cases()); }
TEST(ExtraRules, BackendDeclaresCP050) { run_cases(backend_cases()); }

TEST(ExtraRules, LegalCallsOfEveryKind) {
  for (const std::string_view strategy : known_strategies()) {
    AttentionSpec spec = legal();
    spec.strategy = strategy;
    set_joint(spec, 5);
    spec.joint_position = "suffix";
    spec.joint_valid_lens = {0, 5};
    spec.is_causal = true;
    spec.sinks = sinks({6});
    spec.softcap = 30.0;
    spec.qkv_format = "sbhd";
    spec.policy.output_restore_dim = 0;
    EXPECT_EQ(ids(check_attention(spec)), Ids{});
    spec = legal();
    spec.strategy = strategy;
    spec.kv_role = "replicated";
    set_rows(spec.k, 77);
    set_rows(spec.v, 77);
    EXPECT_EQ(ids(check_attention(spec)), Ids{});
    set_rows(spec.k, 0);
    set_rows(spec.v, 0);
    EXPECT_EQ(ids(check_attention(spec)), Ids{});
  }
}

// Replicated keys are cut into nothing, so no divisibility is asked of them.
TEST(ExtraRules, StrictLengthsAreNotAskedOfReplicatedKeys) {
  AttentionSpec spec = legal();
  spec.policy.auto_pad = false;
  spec.kv_role = "replicated";
  set_rows(spec.k, 77);
  set_rows(spec.v, 77);
  EXPECT_EQ(ids(check_attention(spec)), Ids{});
}

TEST(ExtraRules, JointTokensDoNotCountAsRowsOfTheRank) {
  AttentionSpec spec = legal();
  set_layout(spec, {752, 752, 752, 744}, {752, 752, 752, 752});
  set_joint(spec, 5);
  EXPECT_EQ(ids(check_attention(spec)), Ids{});
  set_rows(spec.q, 752);
  EXPECT_EQ(ids(check_attention(spec)), Ids{"CP012"});
  spec.layout.reset();
  spec.policy.auto_pad = false;
  set_rows(spec.q, 757);
  EXPECT_EQ(ids(check_attention(spec)), Ids{}) << "752 is a multiple of 8, and 757 is not asked";
}

}  // namespace
}  // namespace ulysses::contract
