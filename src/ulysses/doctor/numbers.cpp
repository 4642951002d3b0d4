#include "ulysses/doctor/numbers.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "ulysses/base/text.h"
#include "ulysses/doctor/tensors.h"

namespace ulysses::doctor {
namespace {

using base::cat;

// Error of the output against one process with another scale.
double error_at_scale(const Question& question, const at::Tensor& out, double scale) {
  Question other = question;
  other.c.softmax_scale = scale;
  other.c.backward = false;
  return largest(out - attention_reference(other).out);
}

// The scale in [1e-3, 10] at which one process gives these values; 0 if there is none. A coarse look, then the least
// error between its neighbours by thirds.
double fitted_scale(const Question& question, const at::Tensor& out, double close) {
  constexpr double kStep = 1.25;
  double best = 0, least = std::numeric_limits<double>::infinity();
  for (double scale = 1e-3; scale <= 10; scale *= kStep) {
    const double error = error_at_scale(question, out, scale);
    if (error >= least) continue;
    best = scale;
    least = error;
  }
  double low = best / kStep, high = best * kStep;
  for (int step = 0; step < 30; ++step) {
    const double left = low + (high - low) / 3, right = high - (high - low) / 3;
    const bool is_left = error_at_scale(question, out, left) < error_at_scale(question, out, right);
    (is_left ? high : low) = is_left ? right : left;
  }
  const double scale = (low + high) / 2;
  return error_at_scale(question, out, scale) < close ? scale : 0;
}

Diagnosis scale_finding(const Case& c, double scale) {
  const auto d = static_cast<double>(c.head_dim);
  const double usual = 1 / std::sqrt(d);
  const auto is = [&](double value) { return std::abs(scale - value) < 1e-3 * value; };
  if (c.softmax_scale != 0 && is(usual))
    return Finding{
        "scale_ignored",
        cat("softmax_scale=", c.softmax_scale, " is ignored: the numbers are those of 1 / sqrt(D) = ", usual),
        {}};
  struct Known {
    double value;
    std::string_view name;
  };
  const Known known[] = {
      {1 / d, " (1 / D)"}, {1, " (no scale)"}, {1 / usual, " (sqrt(D))"}, {usual / d, " (1 / D^1.5)"}};
  const auto* found = std::find_if(std::begin(known), std::end(known), [&](const Known& k) { return is(k.value); });
  const bool named = found != std::end(known);
  return Finding{
      "scale",
      cat("the softmax scale is ", named ? found->value : scale, named ? found->name : "", " instead of ", c.scale()),
      {}};
}

}  // namespace

Diagnosis explain_values(Examiner& examiner, const Case& c) {
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  if (!seen.complete()) return std::nullopt;
  const at::Tensor wanted = attention_reference(question).out;
  const bool finite = seen.out.isfinite().all().item<bool>();
  if (c.magnitude > 1) {
    Case moderate = c;
    moderate.magnitude = 1;
    if (examiner.is_ok(moderate)) {
      const Verdict verdict = judge(question, seen);
      return Finding{
          "overflow",
          cat("the softmax breaks where scores are large (around ", 4 * c.magnitude,
              "): subtract each row's maximum first; ",
              finite ? verdict.message : cat("not finite in tokens ", verdict.tokens, ", heads ", verdict.heads)),
          {}};
    }
  }
  if (!finite)
    return Finding{"not_finite", cat("the output is not finite in tokens ", judge(question, seen).tokens), {}};
  const double error = largest(seen.out - wanted);
  const double close = c.dtype.ends_with("16") ? 3e-2 : 1e-4;
  if (error < close) {
    if (c.dtype.ends_with("16")) return std::nullopt;
    return Finding{"precision",
                   cat("the values are off by ", error, ", as far as coarser arithmetic than ", c.dtype,
                       " goes: the call gets ", c.dtype, " and must compute in it"),
                   {}};
  }
  if (const double scale = fitted_scale(question, seen.out, close); scale != 0) return scale_finding(c, scale);
  if (error < 3e-2 * std::max(1.0, largest(wanted)))
    return Finding{"precision",
                   cat("the values are off by ", error, ", about as far as 16-bit arithmetic goes: the call gets ",
                       c.dtype, " and must compute in it, and add nothing to the scores"),
                   {}};
  return std::nullopt;
}

Diagnosis explain_lse(Examiner& examiner, const Case& c) {
  if (!c.return_lse) return std::nullopt;
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  if (!seen.complete()) return std::nullopt;
  const at::Tensor wanted = by_tokens(attention_reference(question).lse);
  const auto differs = [&](const at::Tensor& other) { return !(largest(seen.lse - other) < 1e-3); };
  if (!differs(wanted)) return std::nullopt;
  if (!differs(wanted / std::log(2.0)))
    return Finding{"lse_base",
                   cat("lse is in base 2: ", seen.lse[0][0][0][0].item<double>(), " for token 0, head 0 ",
                       "instead of ", wanted[0][0][0][0].item<double>(), ", the natural logarithm"),
                   {}};
  // The lse of the rank's own keys alone.
  bool local = c.cp_size > 1 && c.kv_lengths == c.lengths && !c.has_extras();
  for (int64_t rank = 0; rank < c.cp_size && local; ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (c.lengths[r] == 0) continue;
    Question own = question;
    own.c.cp_size = 1;
    own.c.lengths = own.c.padded_lengths = own.c.kv_lengths = {c.lengths[r]};
    own.c.backward = false;
    for (at::Tensor* x : {&own.q, &own.k, &own.v}) *x = x->narrow(1, c.token_begin(rank), c.lengths[r]);
    const at::Tensor lse = by_tokens(attention_reference(own).lse);
    local = largest(seen.lse.narrow(1, c.token_begin(rank), c.lengths[r]) - lse) < 1e-3;
  }
  const at::Tensor off = (seen.lse - wanted).abs();
  const std::string where = ranges(places((off > 1e-3).any(3).any(2).any(0)));
  if (local)
    return Finding{
        "lse_local", cat("lse covers only the rank's own keys: off by ", largest(off), " in tokens ", where), {}};
  return Finding{"lse", cat("lse is off by ", largest(off), " in tokens ", where), {}};
}

}  // namespace ulysses::doctor
