// What everything is measured against: an independent float64 attention, and closed forms.
#include <gtest/gtest.h>

#include "masked_attention.h"
#include "reference_attention.h"
#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/reference.h"

namespace ulysses::doctor {
namespace {

using namespace ulysses::testing;

Case whole(int64_t seq_len, int64_t kv_seq_len) {
  Case c = plain_case(1, "");
  set_shards(c, seq_len);
  c.kv_lengths = {kv_seq_len};
  c.backward = false;
  return c;
}

// q = k = 0 and v = the number of its token: row i of the output is the mean number of the keys that it sees. [B, S]
at::Tensor mean_numbers(const Case& c) {
  Question question = make_question(c);
  question.q = at::zeros_like(question.q);
  question.k = at::zeros_like(question.k);
  question.v = at::arange(c.kv_seq_len()).to(at::kFloat).view({1, -1, 1, 1}).expand_as(question.v);
  if (c.text_len > 0) {
    question.text_k = at::zeros_like(question.text_k);
    question.text_v = at::zeros_like(question.text_v);
  }
  const at::Tensor out = attention_reference(question).out;
  EXPECT_LE(max_error(out, out.narrow(2, 0, 1).narrow(3, 0, 1).expand_as(out)), 1e-12);  // heads and columns alike
  return out.select(3, 0).select(2, 0);
}

void expect_rows(const at::Tensor& rows, const std::vector<double>& wanted) {
  ASSERT_EQ(rows.sizes(), (std::vector<int64_t>{std::ssize(wanted)}));
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(rows[static_cast<int64_t>(i)].item<double>(), wanted[i], 1e-12) << "row " << i;
}

TEST(DoctorReference, EqualsAnIndependentOneWithItsGradients) {
  for (const bool is_causal : {false, true}) {
    for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{4, 4}, {12, 3}, {3, 1}}) {
      Case c = whole(7, 9);
      c.num_heads = heads, c.num_kv_heads = kv_heads, c.value_head_dim = 8, c.dtype = "float64";
      c.is_causal = is_causal, c.softmax_scale = 0.3, c.backward = true;
      const Question question = make_question(c);
      AttentionCase plain;
      plain.kv_len = 9, plain.heads = heads, plain.kv_heads = kv_heads, plain.v_head_dim = 8;
      plain.is_causal = is_causal;
      const AttentionInputs in{question.q, question.k, question.v, question.grad_out};
      const testing::AttentionResult wanted = reference_attention(in, plain);
      const Reference got = attention_reference(question);
      expect_close("out", got.out, wanted.out, 1e-12);
      expect_close("lse", got.lse, wanted.lse, 1e-12);
      expect_close("dq", got.dq, wanted.dq, 1e-12);
      expect_close("dk", got.dk, wanted.dk, 1e-12);
      expect_close("dv", got.dv, wanted.dv, 1e-12);
    }
  }
}

TEST(DoctorReference, CausalRowsAreTheMeanUpToTheirOwnToken) {
  Case c = whole(6, 6);
  expect_rows(mean_numbers(c)[0], {2.5, 2.5, 2.5, 2.5, 2.5, 2.5});
  c.is_causal = true;
  expect_rows(mean_numbers(c)[0], {0, 0.5, 1, 1.5, 2, 2.5});
  expect_rows(mean_numbers(c)[1], {0, 0.5, 1, 1.5, 2, 2.5});
}

TEST(DoctorReference, BottomRightShiftsByTheDifferenceOfTheLengths) {
  Case c = whole(3, 5);
  c.is_causal = c.bottom_right = true;
  expect_rows(mean_numbers(c)[0], {1, 1.5, 2});  // keys 0-2, 0-3, 0-4
  c.bottom_right = false;
  expect_rows(mean_numbers(c)[0], {0, 0.5, 1});
}

TEST(DoctorReference, AWindowIsThatManyKeysToTheLeftAndTheOwn) {
  Case c = whole(6, 6);
  c.window = 2;
  expect_rows(mean_numbers(c)[0], {0, 0.5, 1, 2, 3, 4});
}

TEST(DoctorReference, DocumentsDoNotSeeEachOther) {
  Case c = whole(6, 6);
  c.num_documents = 2;
  expect_rows(mean_numbers(c)[0], {1, 1, 1, 4, 4, 4});
  c.is_causal = true;
  expect_rows(mean_numbers(c)[0], {0, 0.5, 1, 3, 3.5, 4});
}

TEST(DoctorReference, AKeyMaskHidesTheTailOfTheFirstHalfOfTheBatch) {
  Case c = whole(6, 6);
  c.mask = "key";
  expect_rows(mean_numbers(c)[0], {1, 1, 1, 1, 1, 1});
  expect_rows(mean_numbers(c)[1], {2.5, 2.5, 2.5, 2.5, 2.5, 2.5});
  c.mask = "key_4d", c.is_causal = true;
  expect_rows(mean_numbers(c)[0], {0, 0.5, 1, 1, 1, 1});
}

TEST(DoctorReference, JointTextIsSeenByAllAndCountsOnce) {
  Case c = whole(4, 4);
  c.text_len = 2;
  expect_rows(mean_numbers(c)[0], {1, 1, 1, 1});  // (0 + 1 + 2 + 3) / 6
  c.is_causal = true;
  expect_rows(mean_numbers(c)[0], {0, 1.0 / 4, 3.0 / 5, 1});
  c.text_suffix = true;  // behind the sequence: no query of it sees the text
  expect_rows(mean_numbers(c)[0], {0, 0.5, 1, 1.5});
}

TEST(DoctorReference, JointTokensBehindTheirEndAreSeenByNobodyAndSeeNothing) {
  Case c = whole(4, 4);
  c.text_len = 3, c.text_lens = {1, 0};
  expect_rows(mean_numbers(c)[0], {6.0 / 5, 6.0 / 5, 6.0 / 5, 6.0 / 5});
  expect_rows(mean_numbers(c)[1], {1.5, 1.5, 1.5, 1.5});
  c.backward = c.return_lse = c.lse_grad = c.sinks = true;
  const Reference got = attention_reference(make_question(c));
  EXPECT_EQ(max_abs(got.text_out[0].narrow(0, 1, 2)), 0.0);
  EXPECT_EQ(max_abs(got.text_out[1]), 0.0);
  EXPECT_GT(max_abs(got.text_out[0][0]), 0.1);
  EXPECT_TRUE(got.text_lse[1].isneginf().all().item<bool>());
  for (const at::Tensor& grad : {got.text_dq, got.text_dk, got.text_dv}) {
    EXPECT_EQ(max_abs(grad[0].narrow(0, 1, 2)) + max_abs(grad[1]), 0.0);
    EXPECT_GT(max_abs(grad[0][0]), 1e-3);
  }
}

// Text beside the sequence is one sequence: the same numbers as without text for the longer one.
TEST(DoctorReference, AJoinedSequenceIsOneSequence) {
  for (const bool suffix : {false, true}) {
    Case c = whole(5, 5);
    c.text_len = 3, c.text_suffix = suffix;
    c.is_causal = c.backward = c.return_lse = c.lse_grad = true;
    c.num_kv_heads = 2, c.mask = "full";
    const Question question = make_question(c);
    Question one = make_question(whole(8, 8));
    one.c.num_kv_heads = 2;
    one.c.is_causal = one.c.backward = one.c.return_lse = one.c.lse_grad = true;
    one.mask = question.mask;
    const auto join = [&](const at::Tensor& text, const at::Tensor& x, int64_t dim) {
      return suffix ? at::cat({x, text}, dim) : at::cat({text, x}, dim);
    };
    one.q = join(question.text_q, question.q, 1);
    one.k = join(question.text_k, question.k, 1);
    one.v = join(question.text_v, question.v, 1);
    one.grad_out = join(question.text_grad_out, question.grad_out, 1);
    one.grad_lse = join(question.text_grad_lse, question.grad_lse, 2);
    const Reference got = attention_reference(question), wanted = attention_reference(one);
    expect_close("out", join(got.text_out, got.out, 1), wanted.out, 1e-12);
    expect_close("lse", join(got.text_lse, got.lse, 2), wanted.lse, 1e-12);
    expect_close("dq", join(got.text_dq, got.dq, 1), wanted.dq, 1e-12);
    expect_close("dk", join(got.text_dk, got.dk, 1), wanted.dk, 1e-12);
    expect_close("dv", join(got.text_dv, got.dv, 1), wanted.dv, 1e-12);
  }
}

TEST(DoctorReference, MasksSinksSoftcapAndLseGradientsAreThoseOfAnotherFloat64) {
  for (const char* mask : {"", "key", "query", "head", "full"}) {
    for (const bool additive : {false, true}) {
      if (additive && *mask == 0) continue;
      Case c = whole(7, 9);
      c.dtype = "float64", c.backward = c.return_lse = c.lse_grad = true;
      c.num_heads = 4, c.num_kv_heads = 2, c.sinks = true, c.softcap = 1.5;
      c.mask = mask, c.additive_mask = additive, c.blind_rows = *mask != 0;
      ASSERT_EQ(problem_of(c), "");
      SCOPED_TRACE(c.id());
      const Question question = make_question(c);
      AttentionCase shape;
      shape.batch = c.batch, shape.q_len = 7, shape.kv_len = 9, shape.heads = 4, shape.kv_heads = 2;
      shape.head_dim = shape.v_head_dim = 16, shape.softmax_scale = 0.25;
      MaskedInputs in{{question.q, question.k, question.v, question.grad_out},
                      question.mask,
                      question.sinks,
                      question.grad_lse,
                      c.softcap};
      if (in.mask.defined() && in.mask.dim() == 2) in.mask = in.mask.unsqueeze(1).unsqueeze(1);
      const MaskedResult wanted = reference_masked_attention(in, shape);
      const Reference got = attention_reference(question);
      expect_close("out", got.out, wanted.plain.out, 1e-12);
      expect_close("lse", got.lse, wanted.plain.lse, 1e-12);
      expect_close("dq", got.dq, wanted.plain.dq, 1e-12);
      expect_close("dk", got.dk, wanted.plain.dk, 1e-12);
      expect_close("dv", got.dv, wanted.plain.dv, 1e-12);
      expect_close("dsinks", got.dsinks, wanted.dsinks, 1e-12);
      if (additive) expect_close("dmask", got.dmask.view_as(wanted.dmask), wanted.dmask, 1e-12);
    }
  }
}

TEST(DoctorReference, ARowThatSeesNothingIsZeroWithAnLseOfMinusInfinityAndFiniteGradients) {
  Case c = whole(5, 3);
  c.is_causal = c.bottom_right = c.backward = true;
  const Reference got = attention_reference(make_question(c));
  EXPECT_EQ(max_abs(got.out.narrow(1, 0, 2)), 0.0);
  EXPECT_GT(got.out.narrow(1, 2, 3).abs().min().item<double>(), 0.0);
  EXPECT_TRUE(got.lse.narrow(2, 0, 2).isneginf().all().item<bool>());
  EXPECT_TRUE(got.lse.narrow(2, 2, 3).isfinite().all().item<bool>());
  EXPECT_EQ(max_abs(got.dq.narrow(1, 0, 2)), 0.0);
  for (const at::Tensor& grad : {got.dq, got.dk, got.dv}) EXPECT_TRUE(grad.isfinite().all().item<bool>());
  EXPECT_GT(max_abs(got.dv), 0.1);
}

TEST(DoctorReference, LseOfZeroScoresIsTheLogarithmOfTheVisibleKeys) {
  Case c = whole(4, 4);
  c.is_causal = true;
  Question question = uniform_question(c, at::ones({2, 4, 4, 16}));
  const at::Tensor lse = attention_reference(question).lse;
  for (int64_t i = 0; i < 4; ++i) EXPECT_LE(max_abs(lse.select(2, i) - std::log(static_cast<double>(i + 1))), 1e-12);
}

}  // namespace
}  // namespace ulysses::doctor
