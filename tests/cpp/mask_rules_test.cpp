#include "rule_cases.h"

namespace ulysses::contract {
namespace {

TensorSpec mask(std::vector<int64_t> sizes) {
  return {.sizes = std::move(sizes), .dtype = "bool", .device = "cpu", .is_floating = false};
}

TensorSpec additive(std::vector<int64_t> sizes) {
  return {.sizes = std::move(sizes), .dtype = "float32", .device = "cpu", .is_floating = true, .requires_grad = true};
}

void set_joint(AttentionSpec& spec, int64_t tokens) {
  spec.joint_len = tokens;
  for (TensorSpec* tensor : {&spec.q, &spec.k, &spec.v}) tensor->sizes[1] += tokens;
}

constexpr const char* kKeyMask = "attn_mask of shape [2|1, 6|1, S_q|1, S_kv], or [2, S_kv] for key padding";

// 752 rows a rank, 3008 in all; B=2 and H=6.
std::vector<Case> shape_cases() {
  return {
      {"CP027",
       CHANGE(s.mask_type = "BlockMask"; s.mask_kv = "global"),
       "attn_mask is a BlockMask, not a tensor",
       {{kKeyMask, CHANGE(s.mask_type.clear(); s.attn_mask = mask({2, 3008}))},
        {"; or attn_mask=None", CHANGE(s.mask_type.clear(); s.mask_kv.clear())}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({752})),
       "attn_mask has shape [752]",
       {{kKeyMask, CHANGE(s.attn_mask = mask({2, 3008}))}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({2, 752, 3008})),
       "attn_mask has shape [2, 752, 3008]",
       {{"attn_mask.unsqueeze(1), if it is [B, S_q, S_kv]; or ", CHANGE(s.attn_mask = mask({2, 1, 752, 3008}))},
        {kKeyMask, CHANGE(s.attn_mask = mask({1, 6, 3008, 3008}))}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({3, 6, 1, 3008})),
       "attn_mask has shape [3, 6, 1, 3008] for B=2 and H=6",
       {{kKeyMask, CHANGE(s.attn_mask = mask({2, 6, 1, 3008}))}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({2, 2, 1, 3008})),
       "attn_mask has shape [2, 2, 1, 3008] for B=2 and H=6",
       {{kKeyMask, CHANGE(s.attn_mask = mask({2, 1, 1, 3008}))}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({700, 3008})),
       "attn_mask has shape [700, 3008] for B=2",
       {{"attn_mask[None, None] if it is [S_q, S_kv]; or ", CHANGE(s.attn_mask = mask({1, 1, 3008, 3008}))},
        {kKeyMask, CHANGE(s.attn_mask = mask({1, 3008}))}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({2, 100})),
       "attn_mask has S_kv=100",
       {{"attn_mask with S_kv=752 (local)", CHANGE(s.attn_mask->sizes[1] = 752)},
        {", or 3008 (global)", CHANGE(s.attn_mask->sizes[1] = 3008)}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({2, 1, 100, 3008})),
       "attn_mask has S_q=100",
       {{"attn_mask with S_q=1 (broadcast)", CHANGE(s.attn_mask->sizes[2] = 1)},
        {", or 752 (local)", CHANGE(s.attn_mask->sizes[2] = 752)},
        {", or 3008 (global)", CHANGE(s.attn_mask->sizes[2] = 3008)}}},
      // Beside a local axis no fix offers a second one.
      {"CP027",
       CHANGE(s.attn_mask = mask({2, 1, 752, 100})),
       "attn_mask has S_kv=100",
       {{"attn_mask with S_kv=3008 (global)", CHANGE(s.attn_mask->sizes[3] = 3008)}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({2, 1, 100, 752})),
       "attn_mask has S_q=100",
       {{"attn_mask with S_q=1 (broadcast)", CHANGE(s.attn_mask->sizes[2] = 1)},
        {", or 3008 (global)", CHANGE(s.attn_mask->sizes[2] = 3008)}}},
      {"CP027",
       CHANGE(set_joint(s, 5); s.attn_mask = mask({2, 3008})),
       "attn_mask has S_kv=3008",
       {{"attn_mask with S_kv=3013 (global)", CHANGE(s.attn_mask->sizes[1] = 3013)}}},
      {"CP027",
       CHANGE(s.kv_role = "replicated"; s.attn_mask = mask({2, 3008})),
       "attn_mask has S_kv=3008",
       {{"attn_mask with S_kv=752 (global)", CHANGE(s.attn_mask->sizes[1] = 752)}}},
      {"CP027",
       CHANGE(s.attn_mask = mask({2, 3008}); s.attn_mask->dtype = "int64"),
       "attn_mask.dtype=int64",
       {{"attn_mask.bool(), if 1 means visible", CHANGE(s.attn_mask->dtype = "bool")}}},
      {"CP022",
       CHANGE(s.attn_mask = mask({2, 3008}); s.attn_mask->device = "cuda:0"),
       "attn_mask.device=cuda:0, q.device=cpu",
       {{"attn_mask.to(\"cpu\")", CHANGE(s.attn_mask->device = "cpu")}}},
  };
}

// 5 real rows of 8 on rank 0, 8 real rows in all: a size of 8 may mean both.
void set_ambiguous(AttentionSpec& spec) {
  for (TensorSpec* tensor : {&spec.q, &spec.k, &spec.v}) set_rows(*tensor, 8);
  set_layout(spec, {5, 1, 1, 1}, {8, 8, 8, 8});
}

std::vector<Case> two_readings_cases() {
  return {
      {"CP028",
       CHANGE(set_ambiguous(s); s.attn_mask = mask({2, 8})),
       "attn_mask has S_kv=8, which is both global and local",
       {{"mask_layout=MaskLayout(kv=\"global\")", CHANGE(s.mask_kv = "global")},
        {", or mask_layout=MaskLayout(kv=\"local\")", CHANGE(s.mask_kv = "local")}}},
      {"CP028",
       CHANGE(set_ambiguous(s); s.attn_mask = mask({2, 1, 8, 8}); s.mask_kv = "global"),
       "attn_mask has S_q=8, which is both global and local",
       {{"mask_layout=MaskLayout(q=\"global\", kv=\"global\")", CHANGE(s.mask_q = "global")},
        {", or mask_layout=MaskLayout(q=\"local\", kv=\"global\")", CHANGE(s.mask_q = "local")}}},
      // One row a rank: a row for all, or this rank's.
      {"CP028",
       CHANGE(for (auto* t
                   : {&s.q, &s.k, &s.v}) set_rows(*t, 1);
              s.attn_mask = mask({2, 1, 1, 4})),
       "attn_mask has S_q=1, which is both broadcast and local",
       {{"mask_layout=MaskLayout(q=\"broadcast\")", CHANGE(s.mask_q = "broadcast")},
        {", or mask_layout=MaskLayout(q=\"local\")", CHANGE(s.mask_q = "local")}}},
      {"CP028",
       CHANGE(s.q.sizes[0] = s.k.sizes[0] = s.v.sizes[0] = 752; s.attn_mask = mask({752, 3008})),
       "attn_mask has shape [752, 3008], which is both [B, S_kv] and [S_q, S_kv]",
       {{"attn_mask[:, None, None, :] for key padding", CHANGE(s.attn_mask->sizes = {752, 1, 1, 3008})},
        {", or attn_mask[None, None] for a row per query", CHANGE(s.attn_mask->sizes = {1, 1, 752, 3008})}}},
  };
}

std::vector<Case> declared_cases() {
  return {
      {"CP028",
       CHANGE(s.mask_kv = "global"),
       "mask_layout is given and attn_mask is not",
       {{"mask_layout=None", CHANGE(s.mask_kv.clear())},
        {", or the attn_mask", CHANGE(s.attn_mask = mask({2, 3008}))}}},
      {"CP028",
       CHANGE(s.attn_mask = mask({2, 752}); s.mask_kv = "global"),
       "mask_layout has kv=\"global\", which is 3008 rows, and attn_mask has S_kv=752",
       {{"attn_mask with S_kv=3008", CHANGE(s.attn_mask->sizes[1] = 3008)},
        {", or mask_layout=MaskLayout(kv=\"local\")", CHANGE(s.mask_kv = "local")}}},
      {"CP028",
       CHANGE(s.attn_mask = mask({2, 1, 3008, 3008}); s.mask_q = "broadcast"; s.mask_kv = "global"),
       "mask_layout has q=\"broadcast\", which is 1 rows, and attn_mask has S_q=3008",
       {{"attn_mask with S_q=1", CHANGE(s.attn_mask->sizes[2] = 1)},
        {", or mask_layout=MaskLayout(q=\"global\", kv=\"global\")", CHANGE(s.mask_q = "global")}}},
      {"CP028",
       CHANGE(set_joint(s, 5); s.attn_mask = mask({2, 3013}); s.mask_kv = "local"),
       "mask_layout has kv=\"local\", which is no axis of this call, and attn_mask has S_kv=3013",
       {{"mask_layout=MaskLayout(kv=\"global\")", CHANGE(s.mask_kv = "global")}}},
      {"CP028",
       CHANGE(set_joint(s, 5); s.attn_mask = mask({2, 1, 752, 3013}); s.mask_q = "local"),
       "mask_layout has q=\"local\", which is no axis of this call, and attn_mask has S_q=752",
       {{"attn_mask with S_q=1 (broadcast), or 3013 (global), and mask_layout=None",
         CHANGE(s.attn_mask->sizes[2] = 3013; s.mask_q.clear())}}},
      {"CP028",
       CHANGE(s.attn_mask = mask({2, 1, 752, 752})),
       "attn_mask has S_q=752 and S_kv=752, both local",
       {{"attn_mask with S_kv=3008 (global)", CHANGE(s.attn_mask->sizes[3] = 3008)},
        {", or attn_mask with S_q=1 (broadcast)", CHANGE(s.attn_mask->sizes[2] = 1)}}},
      {"CP028",
       CHANGE(set_ambiguous(s); s.attn_mask = mask({2, 1, 8, 8}); s.mask_q = s.mask_kv = "local"),
       "attn_mask has S_q=8 and S_kv=8, both local",
       {{"attn_mask with S_kv=8 (global) and mask_layout=MaskLayout(q=\"local\", kv=\"global\")",
         CHANGE(s.mask_kv = "global")},
        {", or attn_mask with S_q=1 (broadcast) and mask_layout=MaskLayout(q=\"broadcast\", kv=\"local\")",
         CHANGE(s.attn_mask->sizes[2] = 1; s.mask_q = "broadcast")}}},
      {"CP028",
       CHANGE(s.policy.require_seq_divisible = false; s.attn_mask = mask({2, 3008})),
       "attn_mask has S_kv=3008, and without a layout under require_seq_divisible=False nobody knows the global length",
       {{"layout=SequenceLayout(seq_len, cp_size, policy)",
         CHANGE(set_layout(s, {752, 752, 752, 752}, {752, 752, 752, 752}))}}},
      {"CP028",  // the rows of this rank are known, those of the others are not
       CHANGE(s.policy.require_seq_divisible = false; s.attn_mask = mask({2, 752}); s.mask_kv = "local"),
       "attn_mask has S_kv=752, and without a layout under require_seq_divisible=False nobody knows the global length",
       {{"layout=SequenceLayout(seq_len, cp_size, policy)",
         CHANGE(set_layout(s, {752, 752, 752, 752}, {752, 752, 752, 752}))}}},
      {"CP028",
       CHANGE(s.attn_mask = mask({2, 3008}); s.mask_q = "local"),
       "mask_layout has q=\"local\", which is no axis of this call, and attn_mask has S_q=1",
       {{"mask_layout=MaskLayout(q=\"broadcast\")", CHANGE(s.mask_q = "broadcast")}}},
      {"CP033",
       CHANGE(s.attn_mask = mask({2, 3008}); s.mask_kv = "globl"),
       "mask_layout.kv=\"globl\" is unknown",
       {{"mask_layout.kv=\"global\"", CHANGE(s.mask_kv = "global")},
        {" or mask_layout.kv=\"local\"", CHANGE(s.attn_mask->sizes[1] = 752; s.mask_kv = "local")}}},
  };
}

std::vector<Case> gradient_cases() {
  return {
      {"CP040",
       CHANGE(s.attn_mask = additive({2, 752})),
       "attn_mask requires a gradient and one of its axes is local, so it would have to be gathered",
       {{"the global mask on every rank", CHANGE(s.attn_mask->sizes[1] = 3008)},
        {", or attn_mask.detach()", CHANGE(s.attn_mask->requires_grad = false)}}},
      {"CP040",
       CHANGE(s.attn_mask = additive({1, 6, 752, 3008})),
       "attn_mask requires a gradient and one of its axes is local, so it would have to be gathered",
       {{"the global mask on every rank", CHANGE(s.attn_mask->sizes[2] = 3008)},
        {", or attn_mask.detach()", CHANGE(s.attn_mask->requires_grad = false)}}},
  };
}

TEST(MaskRules, ShapesAndDtypesCP027) { run_cases(shape_cases()); }
TEST(MaskRules, TwoReadingsCP028) { run_cases(two_readings_cases()); }
TEST(MaskRules, DeclaredAxesCP028) { run_cases(declared_cases()); }
TEST(MaskRules, GradientOfAShardedMaskCP040) { run_cases(gradient_cases()); }

TEST(MaskRules, BothAxesMayBeWrongAtOnce) {
  AttentionSpec spec = legal();
  spec.attn_mask = mask({2, 1, 100, 200});
  EXPECT_EQ(ids(check_attention(spec)), (Ids{"CP027", "CP027"}));
  spec.attn_mask = mask({5, 4, 100, 3008});
  EXPECT_EQ(ids(check_attention(spec)), (Ids{"CP027", "CP027"}));
}

// The mask would be judged by a length that the other error has called wrong.
TEST(MaskRules, AMaskIsNotJudgedByAnIllegalLayout) {
  AttentionSpec spec = legal();
  set_layout(spec, {752, -1, 0, 0}, {752, 0, 0, 0});
  spec.attn_mask = mask({2, 100});
  EXPECT_EQ(ids(check_attention(spec)), Ids{"CP012"});
}

TEST(MaskRules, LegalMasksOfEveryForm) {
  const std::vector<std::vector<int64_t>> shapes = {
      {2, 3008},          {1, 3008},         {2, 752},       {2, 1, 1, 3008},    {1, 6, 1, 3008},
      {2, 6, 3008, 3008}, {2, 6, 752, 3008}, {2, 1, 1, 752}, {1, 1, 3008, 3008}, {1, 6, 3008, 752},
  };
  for (const auto& shape : shapes) {
    AttentionSpec spec = legal();
    spec.attn_mask = mask(shape);
    EXPECT_EQ(ids(check_attention(spec)), Ids{}) << base::join(shape);
    spec.attn_mask = additive(shape);
    spec.attn_mask->requires_grad = false;
    spec.attn_mask->dtype = "bfloat16";
    EXPECT_EQ(ids(check_attention(spec)), Ids{}) << base::join(shape);
  }
}

}  // namespace
}  // namespace ulysses::contract
