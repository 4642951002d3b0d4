#include "ulysses/doctor/probes.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <cmath>

#include "ulysses/base/text.h"
#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/diagnose.h"
#include "ulysses/doctor/duality.h"
#include "ulysses/doctor/order.h"
#include "ulysses/doctor/tensors.h"
#include "ulysses/doctor/weights.h"

namespace ulysses::doctor {
namespace {

using base::cat;

constexpr double kClose = 1e-4;  // float32 questions; a wrong recipe errs by 1e-2 and more

// The observation, or the reason why there is none in the probe's result. What is not a number shows nothing.
Observation observe(Examiner& examiner, const Question& question, ProbeResult& result) {
  Observation seen = examiner.observe(question);
  if (seen.complete() && !seen.out.isfinite().all().item<bool>())
    seen.failure = {VerdictKind::kWrong, -1, -1, "out", "the output is not finite", "", "", ""};
  if (!seen.complete()) {
    result.verdict = seen.failure.kind == VerdictKind::kRefused ? ProbeVerdict::kRefused : ProbeVerdict::kNotApplicable;
    result.detail = seen.failure.message;
  }
  return seen;
}

// For a probe that is wrong: the sentence of the full diagnosis of the case in which it showed.
Diagnosis wrong(Examiner& examiner, const Case& c, std::string kind, std::string detail) {
  const Verdict verdict = examiner.check(c);
  if (verdict.kind == VerdictKind::kWrong) return diagnose(examiner, c, verdict);
  return Finding{std::move(kind), std::move(detail), {}};
}

Diagnosis reach_of(Examiner& examiner, const Case& c, ProbeResult& result) {
  if (!observe(examiner, make_question(forward_only(c)), result).complete()) return std::nullopt;
  const Weights weights = measure_weights(examiner, c);
  if (Diagnosis found = explain_weights(c, weights)) return wrong(examiner, c, found->kind, found->sentence);
  return std::nullopt;
}

Diagnosis probe_reach(Examiner& examiner, const Case& plain, ProbeResult& result) {
  return reach_of(examiner, plain, result);
}

Diagnosis probe_causal_reach(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Case c = plain;
  c.is_causal = true;
  return reach_of(examiner, c, result);
}

// Fewer queries than keys: the mask's alignment shows.
Diagnosis probe_cross_reach(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Case c = plain;
  c.is_causal = true;
  c.kv_lengths.assign(c.kv_lengths.size(), 11);
  return reach_of(examiner, c, result);
}

// q = k = 0 and v = 1: every output is 1, and lse is the logarithm of the number of visible keys.
Diagnosis probe_uniform(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Case c = forward_only(plain);
  const Question mean = uniform_question(c, at::ones_like(make_question(c).v));
  const Observation seen = observe(examiner, mean, result);
  if (!seen.complete()) return std::nullopt;
  const double off = largest(seen.out - 1);
  if (!(off < kClose)) return wrong(examiner, c, "other_weights", cat("the mean of ones is off by ", off));
  c.return_lse = true;
  ProbeResult lse_result;
  Question question = mean;
  question.c = c;
  const Observation with_lse = observe(examiner, question, lse_result);
  if (!with_lse.complete()) return std::nullopt;  // no lse on offer: the mean was right
  const double wanted = std::log(static_cast<double>(c.kv_seq_len()));
  const double lse_off = largest(with_lse.lse - wanted);
  if (lse_off < kClose) return std::nullopt;
  return wrong(
      examiner, c, "lse",
      cat("lse is ", with_lse.lse[0][0][0][0].item<double>(), " instead of ln ", c.kv_seq_len(), " = ", wanted));
}

Diagnosis probe_identity(Examiner& examiner, const Case& plain, ProbeResult& result) {
  if (!observe(examiner, make_question(forward_only(plain)), result).complete()) return std::nullopt;
  return explain_order(examiner, plain);
}

Diagnosis probe_kv_heads(Examiner& examiner, const Case& plain, ProbeResult& result) {
  // Whole groups on every rank, and groups that the ranks tear.
  for (const auto& [num_heads, num_kv_heads] :
       {std::pair{4 * plain.cp_size, 2 * plain.cp_size}, {int64_t{6}, int64_t{3}}}) {
    Case c = forward_only(plain);
    c.num_heads = num_heads;
    c.num_kv_heads = num_kv_heads;
    if (!observe(examiner, make_question(c), result).complete()) return std::nullopt;
    if (Diagnosis found = explain_kv_heads(examiner, c)) return found;
  }
  return std::nullopt;
}

// Twice v1 plus v2 gives twice out1 plus out2, for the same q and k.
Diagnosis probe_linearity(Examiner& examiner, const Case& plain, ProbeResult& result) {
  const Case c = forward_only(plain);
  Question one = make_question(c), two = one, both = one;
  two.v = make_question(c, 2).v;
  both.v = one.v * 2 + two.v;
  const Observation a = observe(examiner, one, result), b = observe(examiner, two, result),
                    sum = observe(examiner, both, result);
  if (!a.complete() || !b.complete() || !sum.complete()) return std::nullopt;
  const double off = largest(sum.out - (a.out * 2 + b.out));
  if (off < kClose) return std::nullopt;
  return wrong(examiner, c, "numbers", cat("the output is not linear in v: off by ", off));
}

Diagnosis dual(Examiner& examiner, const Case& c, ProbeResult& result) {
  const Question question = make_question(c);
  const Observation seen = observe(examiner, question, result);
  const Duality duality = duality_of(question, seen);
  if (!duality.complete || duality.holds()) return std::nullopt;
  return wrong(examiner, c, "other_backward", duality.text());
}

Diagnosis probe_duality(Examiner& examiner, const Case& plain, ProbeResult& result) {
  return dual(examiner, plain, result);
}

// With dropout no value is known, but the backward must belong to the weights of the forward.
Diagnosis probe_dropout_duality(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Case c = plain;
  c.dropout_p = 0.5;
  return dual(examiner, c, result);
}

// The same sequence on one rank and on cp_size ranks.
Diagnosis probe_shard_invariance(Examiner& examiner, const Case& plain, ProbeResult& result) {
  const Case c = forward_only(plain);
  Question question = make_question(c);
  const Observation sharded = observe(examiner, question, result);
  if (!sharded.complete()) return std::nullopt;
  question.c.cp_size = 1;
  set_shards(question.c, c.seq_len());
  const Observation whole = observe(examiner, question, result);
  if (!whole.complete()) {
    result.verdict = ProbeVerdict::kNotApplicable;
    result.detail = cat("one rank: ", whole.failure.message);
    return std::nullopt;
  }
  const double off = largest(sharded.out - whole.out);
  if (off < kClose) return std::nullopt;
  return wrong(examiner, c, "numbers", cat(c.cp_size, " ranks and one give other numbers, by ", off));
}

// dim 0 or 2 of all inputs reversed: so must be the output.
Diagnosis permutation(Examiner& examiner, const Case& plain, int64_t dim, ProbeResult& result) {
  const Case c = forward_only(plain);
  Question question = make_question(c), flipped = question;
  for (at::Tensor* x : {&flipped.q, &flipped.k, &flipped.v}) *x = x->flip(dim).contiguous();
  const Observation seen = observe(examiner, question, result), turned = observe(examiner, flipped, result);
  if (!seen.complete() || !turned.complete()) return std::nullopt;
  const double off = largest(turned.out.flip(dim) - seen.out);
  if (off < kClose) return std::nullopt;
  const std::string what = dim == 0 ? "sequences of the batch" : "heads";
  return wrong(examiner, c, dim == 0 ? "batch_mixed" : "head_order",
               cat("the ", what, " are not independent: reversed inputs give other numbers, by ", off));
}

Diagnosis probe_batch_permutation(Examiner& examiner, const Case& plain, ProbeResult& result) {
  return permutation(examiner, plain, 0, result);
}

Diagnosis probe_head_permutation(Examiner& examiner, const Case& plain, ProbeResult& result) {
  return permutation(examiner, plain, 2, result);
}

Diagnosis probe_stride(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Question question = make_question(plain);
  const Observation straight = observe(examiner, question, result);
  if (!straight.complete()) return std::nullopt;
  question.c.strided = true;
  const Observation strided = observe(examiner, question, result);
  if (!strided.complete()) return std::nullopt;
  const double off = largest(strided.out - straight.out);
  if (off < kClose) return std::nullopt;
  return Finding{"strides",
                 cat("inputs that are views of [B, H, S, D] storage give other numbers than contiguous ones, by ", off),
                 {}};
}

Diagnosis probe_large_scores(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Case c = plain;
  c.magnitude = 100;
  const Verdict verdict = examiner.check(c);  // scores that overflow are what it looks for: finite or not
  if (verdict.kind == VerdictKind::kRefused) result.verdict = ProbeVerdict::kRefused;
  if (verdict.kind != VerdictKind::kWrong) return std::nullopt;
  return diagnose(examiner, c, verdict);
}

Diagnosis probe_state(Examiner& examiner, const Case& plain, ProbeResult& result) {
  // A shape that nothing was asked in yet, so that the first call is a first one.
  Case c = forward_only(plain);
  set_shards(c, 9);
  c.batch = 3;
  if (Diagnosis found = explain_state(examiner, c)) return found;
  Question question = make_question(c);
  question.hold_result = true;
  const Observation seen = examiner.observe(question);
  for (const RankAnswer& answer : seen.answers)
    if (answer.violation.find("result of the call before") != std::string::npos)
      return Finding{"state", answer.violation, {}};
  observe(examiner, make_question(c), result);
  return std::nullopt;
}

Diagnosis probe_desync(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Question question = make_question(forward_only(plain));
  question.odd_rank = plain.cp_size - 1;
  const Observation seen = examiner.observe(question);
  const Verdict& verdict = seen.failure;
  result.detail = verdict.message;
  if (verdict.kind == VerdictKind::kHung || verdict.kind == VerdictKind::kCrashed)
    return Finding{"desync", cat("ranks that disagree on is_causal: ", verdict.message), {}};
  if (verdict.kind == VerdictKind::kRefused) return std::nullopt;
  result.verdict = ProbeVerdict::kNotApplicable;
  if (seen.complete()) result.detail = "ranks that disagree on is_causal are not noticed: every rank returned";
  return std::nullopt;
}

Diagnosis probe_communication(Examiner& examiner, const Case& plain, ProbeResult& result) {
  Question question = make_question(forward_only(plain));
  question.count_bytes = true;
  const Observation seen = observe(examiner, question, result);
  if (!seen.complete()) return std::nullopt;
  int64_t bytes = 0, collectives = 0;
  for (const RankAnswer& answer : seen.answers) {
    bytes = std::max(bytes, answer.bytes_sent);
    collectives = std::max(collectives, answer.collectives);
  }
  result.detail = cat(collectives, " collectives, ", bytes, " bytes from a rank to the others");
  if (bytes > 0) return std::nullopt;
  const Verdict verdict = judge(question, seen);
  if (verdict.kind == VerdictKind::kOk) {
    result.verdict = ProbeVerdict::kNotApplicable;
    result.detail = "the numbers are right, so what it sends does not pass the group that it is given";
    return std::nullopt;
  }
  return wrong(examiner, question.c, "no_communication",
               "no byte leaves a rank, so k and v cannot be those of the whole sequence");
}

}  // namespace

const std::vector<Probe>& all_probes() {
  static const std::vector<Probe> kProbes = {
      {"state", probe_state},  // first: later ones would be its second call
      {"reach", probe_reach},
      {"causal_reach", probe_causal_reach},
      {"cross_reach", probe_cross_reach},
      {"uniform", probe_uniform},
      {"identity", probe_identity},
      {"kv_heads", probe_kv_heads},
      {"linearity", probe_linearity},
      {"duality", probe_duality},
      {"dropout_duality", probe_dropout_duality},
      {"shard_invariance", probe_shard_invariance},
      {"batch_permutation", probe_batch_permutation},
      {"head_permutation", probe_head_permutation},
      {"stride", probe_stride},
      {"large_scores", probe_large_scores},
      {"desync", probe_desync},
      {"communication", probe_communication},
  };
  return kProbes;
}

}  // namespace ulysses::doctor
