// From answers to a verdict: hand-made answers with one thing off, and what must be said of them.
#include <gtest/gtest.h>

#include "collectives.h"
#include "reference_attention.h"
#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/verdict.h"

namespace ulysses::doctor {
namespace {

using namespace ulysses::testing;
using Answers = std::vector<RankAnswer>;

// Two ranks with 3 and 2 tokens, two heads of 4, one sequence.
Case small() {
  Case c = plain_case(2, "");
  set_shards(c, {3, 2});
  c.batch = 1, c.num_heads = c.num_kv_heads = 2, c.head_dim = c.value_head_dim = 4, c.return_lse = true;
  return c;
}

// What right ranks answer, from a reference that is not the doctor's.
Answers right_answers(const Question& question) {
  const Case& c = question.c;
  AttentionCase whole;
  whole.q_len = whole.kv_len = c.seq_len();
  whole.softmax_scale = c.scale();
  whole.batch = c.batch, whole.heads = c.num_heads, whole.kv_heads = c.num_kv_heads;
  whole.head_dim = c.head_dim, whole.v_head_dim = c.value_head_dim;
  const auto wanted = reference_attention({question.q, question.k, question.v, question.grad_out}, whole);
  Answers answers;
  for (int64_t rank = 0; rank < c.cp_size; ++rank) {
    const auto shard = [&](const at::Tensor& x) {
      return query_shard(c, x, rank, /*padding=*/0).to(question.q.scalar_type()).clone();
    };
    RankAnswer answer;
    answer.out = shard(wanted.out);
    answer.lse = wanted.lse.narrow(2, c.token_begin(rank), c.lengths[static_cast<size_t>(rank)]).clone();
    answer.dq = shard(wanted.dq), answer.dk = shard(wanted.dk), answer.dv = shard(wanted.dv);
    answers.push_back(answer);
  }
  return answers;
}

using Change = std::function<void(Answers&)>;

Verdict verdict_of(const Case& c, const Change& change) {
  const Question question = make_question(c);
  Answers answers = right_answers(question);
  change(answers);
  return judge(question, assemble(question, answers));
}
Verdict verdict_of(const Change& change) { return verdict_of(small(), change); }

TEST(DoctorRanges, RunsOfNumbersAndHowManyMore) {
  EXPECT_EQ(ranges({}), "");
  EXPECT_EQ(ranges({7}), "7");
  EXPECT_EQ(ranges({0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
  EXPECT_EQ(ranges({0, 2, 4, 6, 8}), "0, 2, 4, 6, 8");
  EXPECT_EQ(ranges({0, 2, 4, 6, 8, 10, 11, 13}), "0, 2, 4, 6, 8 and 2 more");
}

TEST(DoctorVerdict, RightAnswersAreOkInEveryDtype) {
  for (const char* dtype : {"float32", "bfloat16", "float16", "float64"}) {
    Case c = small();
    c.dtype = dtype;
    const Verdict verdict = verdict_of(c, [](Answers&) {});
    EXPECT_EQ(verdict.kind, VerdictKind::kOk) << dtype << ": " << verdict.message;
    EXPECT_LE(verdict.error, verdict.allowed);
    EXPECT_GT(verdict.allowed, 0);
  }
}

TEST(DoctorVerdict, AnErrorIsNamedWithItsTokensHeadsAndRanks) {
  const Verdict verdict = verdict_of([](Answers& answers) { answers[1].out[0][0][1].add_(0.125); });
  EXPECT_EQ(verdict.kind, VerdictKind::kWrong);
  EXPECT_EQ(verdict.tensor, "out");
  EXPECT_NEAR(verdict.error, 0.125, 1e-6);
  EXPECT_EQ(verdict.tokens, "3");  // the first of rank 1
  EXPECT_EQ(verdict.heads, "1");
  EXPECT_EQ(verdict.ranks, "1");
  EXPECT_TRUE(contains(verdict.message, "out is off by 0.125, allowed ")) << verdict.message;
  EXPECT_TRUE(contains(verdict.message, ", in tokens 3, heads 1, ranks 1")) << verdict.message;
}

// The bound of float32: 1e-5 of the largest value, here between 1 and 3, and twice the error of one process.
TEST(DoctorVerdict, AnErrorAboveItsBoundIsWrongAndOneBelowIsNot) {
  const auto verdict = [](double error) {
    return verdict_of([&](Answers& answers) { answers[0].out[0][1][0][2].add_(error); });
  };
  EXPECT_EQ(verdict(8e-6).kind, VerdictKind::kOk);
  const Verdict wrong = verdict(5e-5);
  EXPECT_EQ(wrong.kind, VerdictKind::kWrong);
  EXPECT_GT(wrong.allowed, 1e-5);
  EXPECT_LT(wrong.allowed, 4e-5);
}

TEST(DoctorVerdict, LseAndGradientsAreNamedByTheirOwnTokens) {
  const Verdict lse = verdict_of([](Answers& answers) { answers[0].lse[0][1][2].add_(0.5); });
  EXPECT_EQ(lse.tensor + " " + lse.tokens + " " + lse.heads + " " + lse.ranks, "lse 2 1 0");
  const Verdict dv = verdict_of([](Answers& answers) { answers[1].dv.zero_(); });
  EXPECT_EQ(dv.tensor + " " + dv.tokens + " " + dv.heads + " " + dv.ranks, "dv 3-4 0-1 1");
  const Verdict missing = verdict_of([](Answers& answers) { answers[1].dq.reset(); });  // counts as zeros
  EXPECT_EQ(missing.tensor + " " + missing.tokens + " " + missing.ranks, "dq 3-4 1");
  const Verdict worst = verdict_of([](Answers& answers) {
    answers[0].dq[0][0][0].add_(0.1);
    answers[0].dk[0][2][0].add_(5.0);
  });
  EXPECT_EQ(worst.tensor + " " + worst.tokens, "dk 2");
}

TEST(DoctorVerdict, NanIsWrongAndInfinitelyFarOff) {
  const Verdict verdict =
      verdict_of([](Answers& answers) { answers[0].out[0][2][1][0] = std::numeric_limits<float>::quiet_NaN(); });
  EXPECT_EQ(verdict.kind, VerdictKind::kWrong);
  EXPECT_TRUE(std::isinf(verdict.error));
  EXPECT_EQ(verdict.tokens + " " + verdict.heads + " " + verdict.ranks, "2 1 0");
}

TEST(DoctorVerdict, WhatCannotBeComparedIsNamedByRank) {
  const std::vector<std::pair<Change, std::string>> faults = {
      {[](Answers& a) { a[1].out = a[1].out.to(at::kDouble); }, "rank 1: out is float64 for float32 inputs"},
      {[](Answers& a) { a[0].out = a[0].out.narrow(1, 0, 2); },
       "rank 0: out has shape [1, 2, 2, 4] instead of [1, 3, 2, 4]"},
      {[](Answers& a) { a[0].out = a[0].out.transpose(1, 2).contiguous(); },
       "rank 0: the output is restored along the wrong dimension: shape [1, 2, 3, 4] instead of [1, 3, 2, 4]"},
      {[](Answers& a) { a[0].out = a[1].out = at::Tensor(); }, "ranks 0-1: it returns nothing"},
      {[](Answers& a) { a[1].lse.reset(); }, "rank 1: lse has shape none instead of [1, 2, 2] (batch, heads, rows)"},
      {[](Answers& a) { a[0].lse = a[0].lse.transpose(1, 2); },
       "rank 0: lse has shape [1, 3, 2] instead of [1, 2, 3] (batch, heads, rows)"},
      {[](Answers& a) { a[0].violation = "the call writes to its input k"; }, "rank 0: the call writes to its input k"},
  };
  for (const auto& [change, message] : faults) {
    const Verdict verdict = verdict_of(change);
    EXPECT_EQ(verdict.kind, VerdictKind::kWrong) << message;
    EXPECT_EQ(verdict.message, message);
    EXPECT_EQ(verdict.error, -1) << message;
  }
}

TEST(DoctorVerdict, PaddingRowsMustBeZero) {
  Case c = small();
  c.padded_lengths = {3, 3};
  c.return_lse = false;
  EXPECT_EQ(verdict_of(c, [](Answers&) {}).kind, VerdictKind::kOk);
  const Verdict verdict = verdict_of(c, [](Answers& answers) { answers[1].out[0][2][0][0] = 1e-3; });
  EXPECT_EQ(verdict.kind, VerdictKind::kWrong);
  EXPECT_EQ(verdict.message, "rank 1: the padding rows of out are not zero");
}

// Two ranks with joint tokens, sinks and a mask that trains; what right ranks answer, shared gradients as equal parts.
Case with_text() {
  Case c = small();
  c.text_len = 2, c.sinks = c.mask_grad = c.additive_mask = true, c.mask = "full";
  return c;
}

Answers right_answers_with_text(const Question& question) {
  const Case& c = question.c;
  const Reference wanted = attention_reference(question);
  Answers answers;
  for (int64_t rank = 0; rank < c.cp_size; ++rank) {
    const auto shard = [&](const at::Tensor& x) {
      return query_shard(c, x, rank, /*padding=*/0).to(at::kFloat).clone();
    };
    const auto part = [&](const at::Tensor& x) { return (x / static_cast<double>(c.cp_size)).to(at::kFloat); };
    RankAnswer answer;
    answer.out = shard(wanted.out);
    answer.lse = wanted.lse.narrow(2, c.token_begin(rank), c.lengths[static_cast<size_t>(rank)]).clone();
    answer.dq = shard(wanted.dq), answer.dk = shard(wanted.dk), answer.dv = shard(wanted.dv);
    answer.text_out = wanted.text_out.to(at::kFloat), answer.text_lse = wanted.text_lse.clone();
    answer.text_dq = part(wanted.text_dq), answer.text_dk = part(wanted.text_dk);
    answer.text_dv = part(wanted.text_dv), answer.dmask = part(wanted.dmask), answer.dsinks = part(wanted.dsinks);
    answers.push_back(answer);
  }
  return answers;
}

Verdict verdict_with_text(const Change& change) {
  const Question question = make_question(with_text());
  Answers answers = right_answers_with_text(question);
  change(answers);
  return judge(question, assemble(question, answers));
}

TEST(DoctorVerdict, JointTokensAreJudgedOnEveryRankAndTheirGradientsAsASum) {
  EXPECT_EQ(verdict_with_text([](Answers&) {}).kind, VerdictKind::kOk);
  const Verdict one = verdict_with_text([](Answers& answers) { answers[1].text_out[0][1][0].add_(0.5); });
  EXPECT_EQ(one.tensor + " " + one.tokens + " " + one.heads + " " + one.ranks, "joint_out 1 0 1");
  EXPECT_TRUE(contains(one.message, ", in joint tokens 1, heads 0, ranks 1")) << one.message;
  EXPECT_TRUE(one.is_forward);
  const Verdict lse = verdict_with_text([](Answers& answers) { answers[0].text_lse[0][1][0].add_(0.5); });
  EXPECT_EQ(lse.tensor + " " + lse.tokens + " " + lse.heads + " " + lse.ranks, "joint_lse 0 1 0");
  // Each rank the whole gradient instead of its part; or one rank none.
  const auto whole = [](at::Tensor RankAnswer::*member) {
    return verdict_with_text([member](Answers& answers) {
      for (RankAnswer& answer : answers) (answer.*member).mul_(2);
    });
  };
  EXPECT_EQ(whole(&RankAnswer::text_dq).tensor, "joint_dq");
  EXPECT_EQ(whole(&RankAnswer::text_dk).tensor, "joint_dk");
  EXPECT_EQ(whole(&RankAnswer::text_dv).tensor, "joint_dv");
  EXPECT_EQ(whole(&RankAnswer::dmask).tensor, "dmask");
  const Verdict sinks = whole(&RankAnswer::dsinks);
  EXPECT_EQ(sinks.tensor + " " + sinks.heads + " " + sinks.tokens, "dsinks 0-1 ");
  EXPECT_FALSE(sinks.is_forward);
  EXPECT_EQ(verdict_with_text([](Answers& answers) { answers[1].text_dv.reset(); }).tensor, "joint_dv");
}

TEST(DoctorVerdict, ATextThatDoesNotComeBackIsSaid) {
  const Verdict none = verdict_with_text([](Answers& answers) { answers[0].text_out.reset(); });
  EXPECT_EQ(none.message, "rank 0: it returns no output of the joint tokens: (out, joint_out) is wanted");
  const Verdict shape = verdict_with_text([](Answers& answers) {
    for (RankAnswer& answer : answers) answer.text_out = answer.text_out.narrow(1, 0, 1);
  });
  EXPECT_EQ(shape.message, "ranks 0-1: joint_out has shape [1, 1, 2, 4] instead of [1, 2, 2, 4]");
  const Verdict lse = verdict_with_text([](Answers& answers) { answers[1].text_lse.reset(); });
  EXPECT_EQ(lse.message, "rank 1: joint_lse has shape none instead of [1, 2, 2] (batch, heads, rows)");
}

TEST(DoctorVerdict, AShapeIsShownInTheCasesFormat) {
  Case c = small();
  c.qkv_format = "sbhd";
  const Verdict verdict = verdict_of(c, [](Answers& answers) { answers[0].out = answers[0].out.narrow(1, 0, 2); });
  EXPECT_EQ(verdict.message, "rank 0: out has shape [2, 1, 2, 4] instead of [3, 1, 2, 4] (qkv_format=\"sbhd\")");
}

RankAnswer with_outcome(Outcome outcome, const std::string& message = "") {
  RankAnswer answer;
  answer.outcome = outcome;
  answer.message = message;
  return answer;
}

TEST(DoctorVerdict, OutcomesThatLeaveNothingToCompare) {
  const std::string refusal = "heads: num_heads=2 over cp_size=3 [CP030]";
  const auto raised = [](const std::string& text) { return with_outcome(Outcome::kRaised, text); };
  const auto returned = with_outcome(Outcome::kReturned), released = with_outcome(Outcome::kReleased);
  const auto hung = with_outcome(Outcome::kHung, "no answer within 5 s");
  const auto crashed = with_outcome(Outcome::kCrashed, "signal 6");
  const auto declined = with_outcome(Outcome::kDeclined, "lse carries no gradient");
  struct Row {
    Answers answers;
    VerdictKind kind;
    std::string message, ranks;
  };
  const std::vector<Row> rows = {
      {{raised(refusal), raised(refusal)}, VerdictKind::kRefused, refusal, "0-1"},
      {{raised(refusal), raised("unexpected")}, VerdictKind::kUnclearMessage, refusal, "0-1"},
      {{raised("unexpected"), raised("unexpected")}, VerdictKind::kUnclearMessage, "unexpected", "0-1"},
      {{returned, raised("no")}, VerdictKind::kOneRankOnly, "rank 1 raised, the others did not: no", "1"},
      {{released, raised("no")}, VerdictKind::kOneRankOnly, "rank 1 raised, the others waited: no", "1"},
      {{raised("no"), hung}, VerdictKind::kOneRankOnly, "rank 0 raised, the others waited: no", "0"},
      {{hung, hung}, VerdictKind::kHung, "no answer within 5 s", "0-1"},
      {{returned, hung}, VerdictKind::kHung, "no answer within 5 s", "1"},
      {{crashed, hung}, VerdictKind::kCrashed, "signal 6", "0"},
      {{crashed, raised("connection closed")}, VerdictKind::kCrashed, "signal 6", "0"},
      {{declined, declined}, VerdictKind::kRefused, "lse carries no gradient", "0-1"},
      {{returned, raised("own keys [CP053]")}, VerdictKind::kWrong, "own keys [CP053]", "1"},
      {{raised("x [CP052]"), raised("x [CP052]")}, VerdictKind::kWrong, "x [CP052]", "0"},
  };
  for (const Row& row : rows) {
    const Question question = make_question(small());
    const Verdict verdict = judge(question, assemble(question, row.answers));
    EXPECT_EQ(verdict.kind, row.kind) << row.message << ": " << to_string(verdict.kind);
    EXPECT_EQ(verdict.message, row.message);
    EXPECT_EQ(verdict.ranks, row.ranks) << row.message;
  }
}

}  // namespace
}  // namespace ulysses::doctor
