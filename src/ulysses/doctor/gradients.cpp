#include "ulysses/doctor/gradients.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ulysses/base/text.h"
#include "ulysses/doctor/duality.h"

namespace ulysses::doctor {
namespace {

using base::cat;

constexpr double kNothing = 0;
constexpr double kNoFactor = std::numeric_limits<double>::quiet_NaN();

std::string meaning(double value, const Case& c) {
  const auto ranks = static_cast<double>(c.cp_size);
  if (std::abs(value - ranks) < 1e-2 * ranks) return cat(" (cp_size: summed over the ranks once too often)");
  if (std::abs(value * ranks - 1) < 1e-2) return " (1 / cp_size: averaged over the ranks instead of summed)";
  return "";
}

// factor [queries of rank i][keys of rank j] of dk or dv.
struct Contributions {
  std::vector<std::vector<double>> dk, dv;
  std::vector<double> dq;  // of the own queries
  bool complete = true;
};

Contributions measure(Examiner& examiner, const Case& c, double tolerance) {
  Contributions found;
  for (int64_t qr = 0; qr < c.cp_size; ++qr) {
    Question question = make_question(c);
    const int64_t begin = c.token_begin(qr), count = c.lengths[static_cast<size_t>(qr)];
    const at::Tensor only = at::zeros_like(question.grad_out);
    only.narrow(1, begin, count).copy_(question.grad_out.narrow(1, begin, count));
    question.grad_out = only;
    for (at::Tensor* text : {&question.text_grad_out, &question.text_grad_lse})
      if (text->defined()) text->zero_();
    if (c.lse_grad) {
      const at::Tensor lse = at::zeros_like(question.grad_lse);
      lse.narrow(2, begin, count).copy_(question.grad_lse.narrow(2, begin, count));
      question.grad_lse = lse;
    }
    const Observation seen = examiner.observe(question);
    found.complete = found.complete && seen.complete();
    if (!found.complete) return found;
    const Reference wanted = attention_reference(question);
    std::vector<double> dk, dv;
    for (int64_t kr = 0; kr < c.cp_size; ++kr) {
      const auto rows = [&](const at::Tensor& x) {
        return x.narrow(1, c.kv_token_begin(kr), c.kv_lengths[static_cast<size_t>(kr)]);
      };
      dk.push_back(gradient_factor(rows(seen.dk), rows(wanted.dk), tolerance));
      dv.push_back(gradient_factor(rows(seen.dv), rows(wanted.dv), tolerance));
    }
    found.dk.push_back(dk);
    found.dv.push_back(dv);
    found.dq.push_back(gradient_factor(seen.dq.narrow(1, begin, count), wanted.dq.narrow(1, begin, count), tolerance));
  }
  return found;
}

// Whether every factor outside of `chosen` is zero and those inside are not.
template <typename Chosen>
bool only(const std::vector<std::vector<double>>& factors, const Case& c, Chosen chosen) {
  bool any = false;
  for (int64_t i = 0; i < c.cp_size; ++i) {
    for (int64_t j = 0; j < c.cp_size; ++j) {
      const auto row = static_cast<size_t>(i), column = static_cast<size_t>(j);
      if (c.lengths[row] == 0 || c.kv_lengths[column] == 0) continue;
      // Under a causal mask nothing is wanted above the diagonal, which reads as 1.
      if (c.is_causal && j > i) continue;
      const bool zero = factors[row][column] == kNothing;
      if (chosen(i, j) == zero) return false;
      any = any || !zero;
    }
  }
  return any;
}

// The one factor of all contributions, or NaN.
double common_factor(const std::vector<std::vector<double>>& factors, const Case& c) {
  double common = kNoFactor;
  for (int64_t i = 0; i < c.cp_size; ++i) {
    for (int64_t j = 0; j < c.cp_size; ++j) {
      if (c.is_causal && j > i) continue;
      const double value = factors[static_cast<size_t>(i)][static_cast<size_t>(j)];
      if (!std::isfinite(common)) common = value;
      if (!(std::abs(value - common) < 1e-2 * std::max(1.0, std::abs(common)))) return kNoFactor;
    }
  }
  return common;
}

std::string factor_text(double value, const std::vector<std::string>& names, const Case& c) {
  const bool one = names.size() == 1;
  const std::string which = cat(one ? "the gradient of " : "the gradients of ", base::join(names));
  if (value == kNothing) return cat(which, one ? " is missing" : " are missing");
  return cat(which, one ? " is " : " are ", value, " times what ", one ? "it" : "they", " must be", meaning(value, c));
}

std::string come(bool k, bool v) {
  return k && v ? "the gradients of k and v come" : cat("the gradient of ", k ? "k" : "v", " comes");
}

Diagnosis of_contributions(const Case& c, const Contributions& found) {
  const auto own = [](int64_t i, int64_t j) { return i == j; };
  const bool k_own = only(found.dk, c, own), v_own = only(found.dv, c, own);
  if ((k_own || v_own) && c.cp_size > 1)
    return Finding{
        "gradient_not_reduced",
        cat(come(k_own, v_own), " from the rank's own queries only: not summed over the ", c.cp_size, " ranks"),
        {}};
  for (int64_t rank = 0; rank < c.cp_size && c.cp_size > 1; ++rank) {
    const auto of_rank = [&](int64_t i, int64_t) { return i == rank; };
    const bool k_of = only(found.dk, c, of_rank), v_of = only(found.dv, c, of_rank);
    if (k_of || v_of)
      return Finding{"gradient_of_one_rank", cat(come(k_of, v_of), " from the queries of rank ", rank, " only"), {}};
  }
  const double k = common_factor(found.dk, c), v = common_factor(found.dv, c);
  const double q = common_factor({found.dq}, [&] {
    Case row = c;
    row.cp_size = 1;
    return row;
  }());
  std::vector<std::pair<std::string, double>> factors;
  for (const auto& [name, value] : {std::pair{"q", q}, {"k", k}, {"v", v}})
    if (c.grad_of.find(name) != std::string::npos) factors.emplace_back(name, value);
  return explain_factors(c, factors);
}

}  // namespace

double gradient_factor(const at::Tensor& got, const at::Tensor& wanted, double tolerance) {
  const double size = (wanted * wanted).sum().item<double>();
  if (wanted.numel() == 0 || size < 1e-20) return 1;
  const double c = (got * wanted).sum().item<double>() / size;
  if (!std::isfinite(c)) return kNoFactor;
  const double scale = std::max(1.0, wanted.abs().max().item<double>()) * std::max(1.0, std::abs(c));
  const double error = (got - wanted * c).abs().max().item<double>();
  if (!(error < tolerance * scale)) return kNoFactor;
  return std::abs(c) < 1e-3 ? kNothing : c;
}

Diagnosis explain_factors(const Case& c, const std::vector<std::pair<std::string, double>>& factors) {
  // Those of one factor share a sentence.
  std::vector<std::pair<double, std::vector<std::string>>> groups;
  for (const auto& [name, value] : factors) {
    if (!std::isfinite(value) || std::abs(value - 1) < 1e-2) continue;
    const auto same = [value = value](const auto& group) { return std::abs(group.first - value) < 1e-2; };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) group = groups.insert(groups.end(), {value, {}});
    group->second.push_back(name);
  }
  if (groups.empty()) return std::nullopt;
  std::vector<std::string> sentences;
  for (const auto& [value, names] : groups) sentences.push_back(factor_text(value, names, c));
  return Finding{groups.front().first == kNothing ? "no_gradient" : "gradient_factor", base::join(sentences, "; "), {}};
}

Diagnosis explain_gradients(Examiner& examiner, const Case& c) {
  if (!c.backward) return std::nullopt;
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  if (!seen.complete()) return std::nullopt;
  const auto none = [&](at::Tensor RankAnswer::*member) {
    return std::none_of(seen.answers.begin(), seen.answers.end(),
                        [&](const RankAnswer& answer) { return (answer.*member).defined(); });
  };
  if (none(&RankAnswer::dq) && none(&RankAnswer::dk) && none(&RankAnswer::dv))
    return Finding{"no_gradient", "the output carries no gradient: backward would train nothing", {}};
  const double tolerance = c.dtype.ends_with("16") ? 5e-2 : 1e-3;
  const Contributions found = measure(examiner, c, tolerance);
  if (found.complete)
    if (Diagnosis by_rank = of_contributions(c, found)) return by_rank;
  const Duality duality = duality_of(question, seen);
  if (duality.complete && !duality.holds()) return Finding{"other_backward", duality.text(), {}};
  const Verdict verdict = judge(question, seen);
  if (verdict.kind != VerdictKind::kWrong) return std::nullopt;
  return Finding{"gradient", cat("the gradients are wrong although the output is right: ", verdict.message), {}};
}

}  // namespace ulysses::doctor
