#include "ulysses/doctor/verdict.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ulysses/base/text.h"
#include "ulysses/doctor/duality.h"
#include "ulysses/doctor/messages.h"
#include "ulysses/doctor/tensors.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::doctor {
namespace {

using base::cat;
using base::join;

double bound_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-12;
    case at::kBFloat16:
      return 0x1p-7;
    case at::kHalf:
      return 0x1p-10;
    default:
      return 1e-5;
  }
}

std::string sizes_text(at::IntArrayRef sizes) { return cat("[", join(sizes), "]"); }

// What our own operation raises because of another rank is no answer of this one: CP067, another rank's attend()
// failed; CP062, the group did.
Outcome own_outcome(const RankAnswer& answer) {
  const auto says = [&](std::string_view words) { return answer.message.find(words) != std::string::npos; };
  if (answer.outcome != Outcome::kRaised) return answer.outcome;
  if (says("[CP067]")) return Outcome::kReleased;
  if (!says("[CP062]")) return Outcome::kRaised;
  return says("torch.distributed failed") ? Outcome::kReleased : Outcome::kCrashed;
}

// Why the outcomes of the ranks leave nothing to compare; kOk if all returned.
Verdict outcome_verdict(const Question& question, const std::vector<RankAnswer>& answers) {
  std::vector<int64_t> raised, crashed, hung, released;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const auto r = static_cast<int64_t>(rank);
    const Outcome outcome = own_outcome(answers[rank]);
    if (outcome == Outcome::kRaised) raised.push_back(r);
    if (outcome == Outcome::kCrashed) crashed.push_back(r);
    if (outcome == Outcome::kHung) hung.push_back(r);
    if (outcome == Outcome::kReleased) released.push_back(r);
  }
  Verdict verdict;
  const auto set = [&](VerdictKind kind, const std::vector<int64_t>& ranks, std::string message) {
    verdict.kind = kind;
    verdict.ranks = ranges(ranks);
    verdict.message = std::move(message);
  };
  const auto text = [&](const std::vector<int64_t>& ranks) {
    return answers[static_cast<size_t>(ranks.front())].message;
  };
  // A rank whose result or exchange our own base class found wrong has not refused anything.
  const auto accused = std::find_if(raised.begin(), raised.end(), [&](int64_t rank) {
    const std::string& message = answers[static_cast<size_t>(rank)].message;
    return message.find("[CP052]") != std::string::npos || message.find("[CP053]") != std::string::npos;
  });
  if (accused != raised.end()) {
    set(VerdictKind::kWrong, {*accused}, answers[static_cast<size_t>(*accused)].message);
  } else if (!crashed.empty()) {  // what the other ranks then raise is its consequence
    set(VerdictKind::kCrashed, crashed, text(crashed));
  } else if (!raised.empty() && raised.size() < answers.size()) {
    set(VerdictKind::kOneRankOnly, raised,
        cat(raised.size() > 1 ? "ranks " : "rank ", ranges(raised), " raised, the others ",
            released.empty() && hung.empty() ? "did not" : "waited", ": ", text(raised)));
  } else if (!hung.empty()) {
    set(VerdictKind::kHung, hung, text(hung));
  } else if (!raised.empty()) {
    const bool clear = std::all_of(answers.begin(), answers.end(), [&](const RankAnswer& answer) {
      return is_clear_message(question.c, answer.message);
    });
    set(clear ? VerdictKind::kRefused : VerdictKind::kUnclearMessage, raised, text(raised));
  } else if (!released.empty()) {
    set(VerdictKind::kCrashed, released, text(released));
  }
  return verdict;
}

// Rows behind the real ones of a rank that are not zero, as those of out and of every gradient must be.
std::string padding_problem(const Case& c, std::string_view name, const at::Tensor& x, int64_t rank) {
  const int64_t real = c.lengths[static_cast<size_t>(rank)], rows = c.padded_lengths[static_cast<size_t>(rank)];
  if (!x.defined() || x.dim() != 4 || x.size(1) != rows || rows == real) return "";
  const double largest = x.narrow(1, real, rows - real).to(at::kDouble).abs().max().item<double>();
  return largest == 0 ? "" : cat("the padding rows of ", name, " are not zero");
}

// What keeps the tensors of one rank from being compared, or is wrong whatever their values are.
std::string form_problem(const Question& question, const RankAnswer& answer, int64_t rank) {
  const Case& c = question.c;
  const int64_t rows = c.padded_lengths[static_cast<size_t>(rank)];
  const std::vector<int64_t> out = {c.batch, rows, c.num_heads, c.value_head_dim};
  const std::vector<int64_t> lse = {c.batch, c.num_heads, rows};
  if (!answer.violation.empty()) return answer.violation;
  if (!answer.out.defined()) return "it returns nothing";
  if (answer.out.sizes() != at::IntArrayRef(out) && answer.out.dim() == 4 &&
      answer.out.numel() == c10::multiply_integers(out))
    return cat("the output is restored along the wrong dimension: shape ", sizes_text(answer.out.sizes()),
               " instead of ", sizes_text(out));
  if (answer.out.sizes() != at::IntArrayRef(out))
    return cat("out has shape ", sizes_text(answer.out.sizes()), " instead of ", sizes_text(out));
  if (answer.out.scalar_type() != question.q.scalar_type())
    return cat("out is ", processors::dtype_name(answer.out.scalar_type()), " for ", c.dtype, " inputs");
  if (c.return_lse && (!answer.lse.defined() || answer.lse.sizes() != at::IntArrayRef(lse)))
    return cat("lse has shape ", answer.lse.defined() ? sizes_text(answer.lse.sizes()) : std::string("none"),
               " instead of ", sizes_text(lse), " (batch, heads, rows)");
  return padding_problem(c, "out", answer.out, rank);
}

// Rows of every rank in token order. `lengths` are the real rows; an undefined part counts as zeros (no gradient came).
at::Tensor rows_of_all(const std::vector<RankAnswer>& answers, at::Tensor RankAnswer::*member,
                       const std::vector<int64_t>& lengths, const at::Tensor& like, bool whole_on_every_rank) {
  std::vector<at::Tensor> parts;
  at::Tensor sum;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const at::Tensor& x = answers[rank].*member;
    std::vector<int64_t> sizes = like.sizes().vec();
    if (whole_on_every_rank) {
      const at::Tensor part = x.defined() ? x.to(at::kDouble) : at::zeros(sizes, at::kDouble);
      sum = sum.defined() ? sum + part : part;
      continue;
    }
    sizes[1] = lengths[rank];
    parts.push_back(x.defined() ? x.to(at::kDouble).narrow(1, 0, lengths[rank]) : at::zeros(sizes, at::kDouble));
  }
  return whole_on_every_rank ? sum : at::cat(parts, 1);
}

// One tensor against its reference, folded into the verdict if it is the worst so far.
struct Comparison {
  const Case& c;
  Verdict& verdict;
  double worst = 0;  // error / allowed

  void compare(std::string_view name, const at::Tensor& got, const at::Tensor& wanted, const at::Tensor& single,
               double bound, bool of_keys) {
    if (wanted.numel() == 0) return;
    const at::Tensor clean = wanted.nan_to_num(0, 0, 0);
    const double largest = clean.abs().max().item<double>();
    const double single_error = (single.nan_to_num(0, 0, 0) - clean).abs().max().item<double>();
    const double allowed = bound * std::max(1.0, largest) + 2 * single_error;
    at::Tensor error = at::where(got == wanted, at::zeros_like(wanted), (got - wanted).abs());
    error = at::where(error.isfinite(), error, at::full_like(error, std::numeric_limits<double>::infinity()));
    const double largest_error = error.max().item<double>();
    if (largest_error / allowed <= worst && !verdict.tensor.empty()) return;
    worst = largest_error / allowed;
    verdict.error = largest_error;
    verdict.allowed = allowed;
    verdict.tensor = name;
    if (worst <= 1) return;
    verdict.kind = VerdictKind::kWrong;
    verdict.is_forward = verdict.is_forward || name == "out" || name == "lse";
    locate(error > allowed, of_keys);
    verdict.message =
        cat(name, " is off by ", verdict.error, ", allowed ", verdict.allowed, ", in tokens ", verdict.tokens,
            of_keys ? ", KV heads " : ", heads ", verdict.heads, ", ranks ", verdict.ranks);
  }

  void locate(const at::Tensor& bad, bool of_keys) {
    const at::Tensor tokens = bad.any(3).any(2).any(0);
    verdict.tokens = ranges(places(tokens));
    verdict.heads = ranges(places(bad.any(3).any(1).any(0)));
    std::vector<int64_t> ranks;
    for (int64_t rank = 0; rank < c.cp_size; ++rank) {
      const auto& lengths = of_keys ? c.kv_lengths : c.lengths;
      const int64_t begin = of_keys ? c.kv_token_begin(rank) : c.token_begin(rank);
      if (tokens.narrow(0, begin, lengths[static_cast<size_t>(rank)]).any().item<bool>()) ranks.push_back(rank);
    }
    verdict.ranks = ranges(ranks);
  }
};

// Under dropout the values are chance. What can be seen: that they are numbers, that dropout was applied at all, and
// that the gradients belong to the weights of the output.
Verdict judge_dropout(const Question& question, const Observation& seen) {
  Verdict verdict;
  const auto wrong = [&](std::string_view tensor, std::string message) {
    verdict.kind = VerdictKind::kWrong;
    verdict.tensor = tensor;
    verdict.message = std::move(message);
    verdict.is_forward = tensor == "out";
    return verdict;
  };
  if (!seen.out.isfinite().all().item<bool>()) return wrong("out", "the output is not finite");
  Question without = question;
  without.c.dropout_p = 0;
  without.c.backward = false;
  const at::Tensor plain = attention_reference(without).out;
  const double close = bound_of(question.q.scalar_type()) * 4 * std::max(1.0, plain.abs().max().item<double>());
  if (seen.out.abs().max().item<double>() == 0 || (seen.out - plain).abs().max().item<double>() < close)
    return wrong("out", cat("dropout_p=", question.c.dropout_p, ": the output is ",
                            seen.out.abs().max().item<double>() == 0 ? "zero" : "that of no dropout"));
  if (!question.c.backward) return verdict;
  const Duality duality = duality_of(question, seen);
  verdict.error = std::abs(duality.of_values - duality.of_output);
  verdict.allowed = duality.allowed;
  verdict.tensor = "dv";
  return duality.complete && duality.holds() ? verdict : wrong("dv", duality.text());
}

}  // namespace

std::string_view to_string(VerdictKind kind) {
  constexpr std::array<std::string_view, 7> kNames = {"ok",   "refused",       "wrong",          "crashed",
                                                      "hung", "one_rank_only", "unclear_message"};
  return kNames[static_cast<size_t>(kind)];
}

std::string ranges(const std::vector<int64_t>& numbers) {
  std::vector<std::string> runs;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    runs.push_back(end == i ? cat(numbers[i]) : cat(numbers[i], "-", numbers[end]));
    i = end + 1;
  }
  constexpr size_t kShown = 5;
  if (runs.size() <= kShown) return join(runs);
  const size_t more = runs.size() - kShown;
  runs.resize(kShown);
  return cat(join(runs), " and ", more, " more");
}

Observation assemble(const Question& question, std::vector<RankAnswer> answers) {
  const Case& c = question.c;
  Observation seen;
  seen.answers = std::move(answers);
  seen.failure = outcome_verdict(question, seen.answers);
  if (!seen.complete()) return seen;
  std::vector<int64_t> odd;
  std::string problem;
  for (int64_t rank = 0; rank < c.cp_size; ++rank) {
    const std::string found = form_problem(question, seen.answers[static_cast<size_t>(rank)], rank);
    if (found.empty()) continue;
    if (odd.empty()) problem = found;
    odd.push_back(rank);
  }
  if (!odd.empty()) {
    seen.failure = {
        VerdictKind::kWrong, -1, -1, "", cat(odd.size() > 1 ? "ranks " : "rank ", ranges(odd), ": ", problem), "", "",
        ranges(odd)};
    return seen;
  }
  seen.out = rows_of_all(seen.answers, &RankAnswer::out, c.lengths, question.grad_out, false);
  if (c.return_lse) {
    for (RankAnswer& answer : seen.answers) answer.lse = by_tokens(answer.lse);
    seen.lse = rows_of_all(seen.answers, &RankAnswer::lse, c.lengths, question.q.narrow(3, 0, 1), false);
  }
  if (!c.backward) return seen;
  seen.dq = rows_of_all(seen.answers, &RankAnswer::dq, c.lengths, question.q, false);
  seen.dk = rows_of_all(seen.answers, &RankAnswer::dk, c.kv_lengths, question.k, c.replicated_kv);
  seen.dv = rows_of_all(seen.answers, &RankAnswer::dv, c.kv_lengths, question.v, c.replicated_kv);
  return seen;
}

Verdict judge(const Question& question, const Observation& seen) {
  if (!seen.complete()) return seen.failure;
  const Case& c = question.c;
  Verdict verdict;
  if (c.dropout_p > 0) return judge_dropout(question, seen);
  const at::ScalarType dtype = question.q.scalar_type();
  const Reference wanted = attention_reference(question), single = attention_reference(question, dtype);
  // Scores of hundreds lose as many digits in the exponential.
  const double bound = bound_of(dtype) * std::max(1.0, c.magnitude / 10);
  Comparison comparison{c, verdict};
  comparison.compare("out", seen.out, wanted.out, single.out.to(at::kDouble), bound, false);
  if (c.return_lse) {
    const at::Tensor lse = by_tokens(wanted.lse);
    comparison.compare("lse", seen.lse, lse, by_tokens(single.lse), dtype == at::kDouble ? bound : 1e-4, false);
  }
  if (c.backward) {
    const auto asked = [&](char name) { return c.grad_of.find(name) != std::string::npos; };
    if (asked('q')) comparison.compare("dq", seen.dq, wanted.dq, single.dq.to(at::kDouble), bound, false);
    if (asked('k')) comparison.compare("dk", seen.dk, wanted.dk, single.dk.to(at::kDouble), bound, true);
    if (asked('v')) comparison.compare("dv", seen.dv, wanted.dv, single.dv.to(at::kDouble), bound, true);
  }
  for (int64_t rank = 0; rank < c.cp_size && verdict.kind == VerdictKind::kOk; ++rank) {
    const RankAnswer& answer = seen.answers[static_cast<size_t>(rank)];
    for (const auto& [name, x] : {std::pair{"dq", answer.dq}, {"dk", answer.dk}, {"dv", answer.dv}})
      if (const std::string problem = padding_problem(c, name, x, rank); !problem.empty())
        return {VerdictKind::kWrong, -1, -1, "", cat("rank ", rank, ": ", problem), "", "", cat(rank), false};
  }
  return verdict;
}

}  // namespace ulysses::doctor
