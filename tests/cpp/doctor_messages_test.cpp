// Which exceptions tell their reader what was asked for and not possible.
#include <gtest/gtest.h>

#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/messages.h"

namespace ulysses::doctor {
namespace {

// 2 ranks of 8 tokens, 4 heads of 16, two sequences.
Case plain() { return plain_case(2, ""); }

Case with(void (*change)(Case&)) {
  Case c = plain();
  change(c);
  return c;
}

struct Row {
  std::string what;
  Case c;
  std::string message;
  bool is_clear;
};

TEST(DoctorMessages, ATextIsClearWhereItNamesTheOptionOrANumberOfTheCase) {
  const Case grouped = with([](Case& c) { c.num_kv_heads = 2; });
  const Case causal = with([](Case& c) { c.is_causal = true; });
  const Case uneven = with([](Case& c) { set_shards(c, {9, 7}); });
  const Case cross = with([](Case& c) { c.kv_lengths = {5, 5}; });
  const Case half = with([](Case& c) { c.dtype = "float16"; });
  const Case forward = with([](Case& c) { c.backward = false; });
  const std::vector<Row> rows = {
      {"ours", plain(), "[ulysses_attention] a window is not supported [CP041]", true},
      {"nothing", plain(), "", false},
      {"a word", plain(), "unexpected", false},
      {"a bare shape", plain(), "shape '[2, 32, 2, 4, 64]' is invalid for input of size 8192", false},
      {"a bare shape of the case", plain(), "shape '[2, 8, 4, 16]' is invalid for input of size 512", false},
      {"stacked shapes", uneven, "stack expects each tensor to be equal size", false},
      {"numbers without a subject", plain(), "got 4 and 16", false},
      {"a subject without numbers", plain(), "wrong number of heads", false},
      {"a subject with numbers in a list", plain(), "every rank must bring as many tokens, not [8, 9]", true},
      {"a subject with numbers of another case", plain(), "num_heads 30 is not divisible by 7", false},
      {"a part of a number", plain(), "sequence of 416 tokens", false},
      {"heads by ranks", plain(), "num_heads 7 is not divisible by 2", true},
      {"tokens", plain(), "sequence length 16 is too short", true},
      {"grouped", grouped, "GQA is not yet supported", true},
      {"grouped, not asked for", plain(), "GQA is not yet supported", false},
      {"causal", causal, "is_causal is not supported", true},
      {"causal, not asked for", plain(), "is_causal is not supported", false},
      {"layout", uneven, "got an unexpected keyword argument 'layout'", true},
      {"kv_layout", cross, "got an unexpected keyword argument 'kv_layout'", true},
      {"upper case", causal, "CAUSAL masks: not implemented", true},
      {"window", with([](Case& c) { c.window = 3; }), "no sliding window", true},
      {"mask", with([](Case& c) { c.mask = "key"; }), "attn_mask must be None", true},
      {"mask, not asked for", plain(), "attn_mask must be None", false},
      {"sinks", with([](Case& c) { c.sinks = true; }), "got an unexpected keyword argument 'sinks'", true},
      {"softcap", with([](Case& c) { c.softcap = 2; }), "softcap is not supported", true},
      {"joint tokens", with([](Case& c) { c.text_len = 3; }), "got an unexpected keyword argument 'joint'", true},
      {"lse gradient", with([](Case& c) { c.lse_grad = true; }), "lse is not differentiable", true},
      {"dropout", with([](Case& c) { c.dropout_p = 0.5; }), "dropout_p must be 0", true},
      {"scale", with([](Case& c) { c.softmax_scale = 0.3; }), "got an unexpected keyword argument 'softmax_scale'",
       true},
      {"lse", with([](Case& c) { c.return_lse = true; }), "lse is not returned", true},
      {"half", half, "\"kernel\" not implemented for 'Half'", true},
      {"half, not asked for", plain(), "\"kernel\" not implemented for 'Half'", false},
      {"backward", plain(), "backward is not implemented", true},
      {"backward, not asked for", forward, "backward is not implemented", false},
  };
  for (const Row& row : rows) EXPECT_EQ(is_clear_message(row.c, row.message), row.is_clear) << row.what;
}

}  // namespace
}  // namespace ulysses::doctor
