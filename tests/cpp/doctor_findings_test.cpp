// One fault in a small attention, and the one sentence that the doctor must find for it; none for what is right.
#include <ATen/ops/einsum.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <memory>

#include "collectives.h"
#include "reference_attention.h"
#include "ulysses/base/text.h"
#include "ulysses/contract/capability.h"
#include "ulysses/doctor/diagnose.h"
#include "ulysses/doctor/duality.h"
#include "ulysses/doctor/examine.h"
#include "ulysses/doctor/weights.h"
#include "ulysses/exchange/token_gather.h"
#include "ulysses/processors/attention.h"

namespace ulysses::doctor {
namespace {

using namespace ulysses::testing;
using exchange::Group;
using processors::AttentionResult;

Returned ours(const RankCall& call, const Group& group) { return registered_target()(call, group); }

// The same call as another case.
RankCall as_case(const RankCall& call, const Case& c) {
  return {c, call.q, call.k, call.v, call.mask, call.sinks, call.text_q, call.text_k, call.text_v};
}

// Refuses what the attentions below don't look at.
void only_plain(const Case& c) {
  TORCH_CHECK_VALUE(!c.has_extras() && c.qkv_format == "bshd" && !c.is_causal && !c.return_lse && c.dropout_p == 0 &&
                        c.num_heads == c.num_kv_heads && c.kv_lengths == c.lengths && c.softmax_scale == 0,
                    "no causal mask, lse, dropout, GQA, cross lengths or scale");
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  return at::einsum("bhij,bjhd->bihd", {(at::einsum("bihd,bjhd->bhij", {q, k}) * scale).softmax(-1), v});
}

// All rows, without a gradient.
at::Tensor gathered(const at::Tensor& x, const Case& c, const Group& group) {
  return exchange::gather_sequence(x.detach(), c.lengths, 1, group);
}

// All rows, with the gradient of the own ones: what a rank's backward gives before it is summed over the ranks.
at::Tensor gathered_own_gradient(const at::Tensor& x, const Case& c, const Group& group) {
  const int64_t begin = c.token_begin(group.rank()), end = begin + x.size(1);
  const at::Tensor all = gathered(x, c, group);
  return at::cat({all.narrow(1, 0, begin), x, all.narrow(1, end, all.size(1) - end)}, 1);
}

AttentionResult local_only(const RankCall& call, const Group&) {
  only_plain(call.c);
  return {attend(call.q, call.k, call.v), {}};
}

AttentionResult values_local(const RankCall& call, const Group& group) {
  only_plain(call.c);
  return {attend(call.q, gathered(call.k, call.c, group), call.v.repeat({1, group.size(), 1, 1})), {}};
}

AttentionResult ranks_reversed(const RankCall& call, const Group& group) {
  only_plain(call.c);
  const int64_t other = group.size() - 1 - group.rank();
  const at::Tensor q = query_shard(call.c, gathered(call.q, call.c, group), other, /*padding=*/0);
  return {attend(q, gathered(call.k, call.c, group), gathered(call.v, call.c, group)), {}};
}

AttentionResult not_reduced(const RankCall& call, const Group& group) {
  only_plain(call.c);
  const auto all = [&](const at::Tensor& x) { return gathered_own_gradient(x, call.c, group); };
  return {attend(call.q, all(call.k), all(call.v)), {}};
}

AttentionResult no_maximum(const RankCall& call, const Group& group) {
  only_plain(call.c);
  const at::Tensor k = gathered(call.k, call.c, group), v = gathered(call.v, call.c, group);
  const at::Tensor weights = (at::einsum("bihd,bjhd->bhij", {call.q, k}) / 4).exp();
  return {at::einsum("bhij,bjhd->bihd", {weights / weights.sum(-1, true), v}), {}};
}

Returned scale_of_d(const RankCall& call, const Group& group) {
  Case c = call.c;
  if (c.softmax_scale == 0) c.softmax_scale = 1 / static_cast<double>(c.head_dim);
  return ours(as_case(call, c), group);
}

Returned other_kv_head(const RankCall& call, const Group& group) {
  if (call.c.num_kv_heads == call.c.num_heads) return ours(call, group);
  RankCall turned = call;
  turned.k = call.k.flip(2);
  turned.v = call.v.flip(2);
  return ours(turned, group);
}

struct Times final : torch::autograd::Function<Times> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double factor) {
    context->saved_data["factor"] = factor;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0] * context->saved_data["factor"].toDouble(), {}};
  }
};

Returned gradient_times_ranks(const RankCall& call, const Group& group) {
  Returned result = ours(call, group);
  result.out = Times::apply(result.out, static_cast<double>(group.size()));
  return result;
}

Returned lse_in_base_2(const RankCall& call, const Group& group) {
  Returned result = ours(call, group);
  if (result.lse.defined()) result.lse = result.lse / std::log(2.0);
  return result;
}

Returned writes_to_k(const RankCall& call, const Group& group) {
  const Returned result = ours(call, group);
  call.k.detach().mul_(2);
  return result;
}

Report examined(const Target& target, const std::string& glob, bool probes = true) {
  ExamineOptions options;
  options.selection.worlds = {2};
  options.selection.dtypes = {"float32"};
  options.selection.glob = glob;
  options.probes = probes;
  ThreadRanks ranks(target);
  return examine(ranks, options);
}

TEST(DoctorFindings, OneFaultIsOneSentence) {
  struct Row {
    Target target;
    std::string kind, sentence;
  };
  const std::vector<Row> rows = {
      {local_only, "local_only", "each rank attends only to its own tokens: keys 8-15 never influence queries 0-7"},
      {values_local, "values_local",
       "v is not gathered although k is: the keys of rank 1 influence the queries of rank 0, their values don't (each "
       "rank attends only to its own tokens: keys 8-15 never influence queries 0-7)"},
      {ranks_reversed, "rank_order",
       "rank 0 gets the rows of rank 1: token 0, head 0 holds what belongs to token 8, head 0"},
      {not_reduced, "gradient_not_reduced",
       "the gradients of k and v come from the rank's own queries only: not summed over the 2 ranks"},
      {scale_of_d, "scale", "the softmax scale is 0.0625 (1 / D) instead of 0.25"},
      {gradient_times_ranks, "gradient_factor",
       "the gradients of q, k, v are 2 times what they must be (cp_size: summed over the ranks once too often)"},
      {writes_to_k, "input_written", "ranks 0-1: the call writes to its input k"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.kind);
    const Report report = examined(row.target, "equal_shards/*/S16-H4-B2");
    EXPECT_FALSE(report.passed());
    ASSERT_EQ(report.findings.size(), 1U) << report.text();
    EXPECT_EQ(report.findings[0].kind, row.kind);
    EXPECT_EQ(report.findings[0].sentence, row.sentence);
    EXPECT_EQ(report.findings[0].cases.size(), report.cases.size());  // all of these cases show it
    EXPECT_GT(report.findings[0].checklist_point(), 0);
    EXPECT_TRUE(contains(report.text(), row.sentence + " [checklist point ")) << report.text();
    EXPECT_TRUE(contains(report.text(), "1 wrong: NOT passed")) << report.text();
  }
}

TEST(DoctorFindings, AFaultThatShowsInOneFeatureNamesWhatIsRight) {
  const Report heads = examined(other_kv_head, "*d_kv/*H8:4-*");
  ASSERT_EQ(heads.findings.size(), 1U) << heads.text();
  EXPECT_EQ(heads.findings[0].kind, "kv_heads");
  EXPECT_EQ(heads.findings[0].sentence,
            "query head 0 reads KV head 3 instead of 0 (8 query heads over 4 KV heads, first in token 0 on rank 0)");
  const Report lse = examined(lse_in_base_2, "return_lse/*-B2-lse");
  ASSERT_EQ(lse.findings.size(), 1U) << lse.text();
  EXPECT_EQ(lse.findings[0].kind, "lse_base");
  EXPECT_TRUE(lse.findings[0].sentence.starts_with("lse is in base 2: ")) << lse.findings[0].sentence;
  const Report overflow = examined(no_maximum, "equal_shards/*-x100", /*probes=*/false);
  ASSERT_EQ(overflow.findings.size(), 1U) << overflow.text();
  EXPECT_EQ(overflow.findings[0].kind, "overflow");
  EXPECT_TRUE(contains(overflow.findings[0].sentence, "subtract each row's maximum first; not finite in tokens "))
      << overflow.findings[0].sentence;
}

TEST(DoctorFindings, OursPassesWithEveryCaseOkOrRefused) {
  ExamineOptions options;
  options.selection.dtypes = {"float32", "bfloat16"};
  int64_t told = 0;
  options.on_case = [&](const CaseResult&, int64_t done, int64_t) { EXPECT_EQ(done, ++told); };
  const Report report = run(registered_target(), options);
  EXPECT_TRUE(report.passed()) << report.text();
  EXPECT_TRUE(report.findings.empty()) << report.text();
  const int64_t ok = report.count(VerdictKind::kOk), refused = report.count(VerdictKind::kRefused);
  EXPECT_EQ(ok + refused, std::ssize(report.cases));
  EXPECT_EQ(told, std::ssize(report.cases));
  EXPECT_EQ(refused, 6 * 2 * 2 * 2);  // six rows of the capability table, two strategies, worlds and dtypes
  EXPECT_EQ(report.text(), base::cat(ok, " ok, ", refused, " refused: passed\n"));
  EXPECT_EQ(report.probes.size(), 17U * 4);
  for (const ProbeResult& probe : report.probes) EXPECT_NE(probe.verdict, ProbeVerdict::kWrong) << probe.name;
  for (const CaseResult& result : report.cases) {
    const auto feature = contract::feature_from_string(result.c.feature);
    const bool supported = contract::capability(result.c.strategy, *feature).support == contract::Support::kSupported;
    EXPECT_EQ(result.verdict.kind, supported ? VerdictKind::kOk : VerdictKind::kRefused) << result.c.id();
  }
}

TEST(DoctorState, OursGivesTheSameBitsForTheSameInputs) {
  ThreadRanks ranks(registered_target());
  Examiner examiner(ranks);
  const Question a = make_question(plain_case(2, ""), 3), b = make_question(plain_case(2, ""), 4);
  const Observation first = examiner.observe(a), second = examiner.observe(a), between = examiner.observe(b),
                    third = examiner.observe(a);
  for (const auto member : {&Observation::out, &Observation::dq, &Observation::dk, &Observation::dv}) {
    EXPECT_TRUE(at::equal(first.*member, second.*member) && at::equal(first.*member, third.*member));
    EXPECT_FALSE(at::equal(first.*member, between.*member));
  }
  EXPECT_FALSE(explain_state(examiner, plain_case(2, "")).has_value());
}

TEST(DoctorState, ACallThatChangesTheNextIsNamed) {
  const auto calls = std::make_shared<std::atomic<int64_t>>(0);
  const Target second_is_half = [calls](const RankCall& call, const Group& group) -> AttentionResult {
    const Returned result = ours(call, group);
    return {calls->fetch_add(1) < group.size() ? result.out : result.out / 2, result.lse};
  };
  ThreadRanks ranks(second_is_half);
  Examiner examiner(ranks);
  const Diagnosis found = explain_state(examiner, plain_case(2, ""));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->kind, "state");
  EXPECT_TRUE(
      found->sentence.starts_with("the second call with the same inputs gives other numbers than the first, by "))
      << found->sentence;
  EXPECT_TRUE(found->sentence.ends_with(": the first is right")) << found->sentence;
}

TEST(DoctorWeights, OursAreTheClosedForm) {
  ThreadRanks ranks(registered_target());
  Examiner examiner(ranks);
  Case c = plain_case(2, "");
  c.is_causal = true;
  const at::Tensor weights = measure_weights(examiner, c).mean_measured();  // row i: 1 / (i + 1) up to i, then 0
  const at::Tensor rows = at::arange(16).view({-1, 1}), keys = at::arange(16).view({1, -1});
  EXPECT_LE(max_error(weights, (keys <= rows).to(at::kDouble) / (rows + 1)), 1e-6);
}

TEST(DoctorInfluence, OfKeysAndValuesRankByRank) {
  ThreadRanks local(local_only), own_values(values_local), right(registered_target());
  const Case c = plain_case(3, "");
  const auto table = [&](Ranks& ranks, Changed changed) {
    Examiner examiner(ranks);
    return influence(examiner, c, changed);
  };
  const at::Tensor all = at::full({3, 3}, true, at::kBool), own = at::eye(3).to(at::kBool);
  EXPECT_TRUE(at::equal(table(right, Changed::kKeys), all) && at::equal(table(right, Changed::kValues), all));
  EXPECT_TRUE(at::equal(table(local, Changed::kKeys), own) && at::equal(table(local, Changed::kValues), own));
  EXPECT_TRUE(at::equal(table(own_values, Changed::kKeys), all));
  EXPECT_TRUE(at::equal(table(own_values, Changed::kValues), own));
}

TEST(DoctorDuality, HoldsForOursAndNotForABackwardOfAnotherForward) {
  const auto measured = [](const Target& target) {
    ThreadRanks ranks(target);
    Examiner examiner(ranks);
    const Question question = make_question(plain_case(2, ""));
    return duality_of(question, examiner.observe(question));
  };
  const Duality right = measured(registered_target());
  EXPECT_TRUE(right.complete && right.holds()) << right.of_values << " " << right.of_output;
  EXPECT_GT(std::abs(right.of_output), 10 * right.allowed);  // it says something
  const Duality wrong = measured(gradient_times_ranks);
  EXPECT_TRUE(wrong.complete && !wrong.holds()) << wrong.of_values << " " << wrong.of_output;
  EXPECT_NEAR(wrong.of_values, 2 * wrong.of_output, wrong.allowed);
}

// Under dropout it is all that can be seen: every call draws other weights.
TEST(DoctorDuality, JudgesDropout) {
  Case c = plain_case(2, "");
  c.dropout_p = 0.5;
  const auto drops = [](double gradient_factor) -> Target {
    return [gradient_factor](const RankCall& call, const Group& group) -> AttentionResult {
      TORCH_CHECK_VALUE(call.c.backward, "dropout is for training: backward");
      Case without = call.c;
      without.dropout_p = 0;
      const at::Tensor out = ours(as_case(call, without), group).out;
      const at::Tensor kept = at::rand({1, 1, 1, out.size(3)}).lt(0.5).to(out.scalar_type()) * 2;
      return {Times::apply(out * kept, gradient_factor), {}};
    };
  };
  for (const double factor : {1.0, 2.0}) {
    ThreadRanks ranks(drops(factor));
    const Verdict verdict = Examiner(ranks).check(c);
    EXPECT_EQ(verdict.kind, factor == 1.0 ? VerdictKind::kOk : VerdictKind::kWrong) << verdict.message;
    EXPECT_EQ(verdict.tensor, "dv");
    EXPECT_EQ(verdict.message.starts_with("the gradient of v belongs to other weights than the output: dv·v = "),
              factor != 1.0)
        << verdict.message;
  }
}

// A case whose backward is refused is asked again without gradients, and only then.
TEST(DoctorFindings, ARefusedBackwardDoesNotHideAWrongForward) {
  const Target forward_only = [](const RankCall& call, const Group& group) -> AttentionResult {
    TORCH_CHECK_VALUE(!call.c.backward, "backward is not offered");
    return local_only(call, group);
  };
  const Report report = examined(forward_only, "equal_shards/*/S16-H4-B2", /*probes=*/false);
  ASSERT_EQ(report.cases.size(), 2U);
  EXPECT_EQ(report.cases[0].verdict.kind, VerdictKind::kRefused);
  EXPECT_EQ(report.cases[1].verdict.kind, VerdictKind::kWrong);
  EXPECT_EQ(report.cases[1].c.id(), "equal_shards/W2/float32/S16-H4-B2-forward");
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_EQ(report.findings[0].kind, "local_only");
  EXPECT_FALSE(report.passed());
}

}  // namespace
}  // namespace ulysses::doctor
