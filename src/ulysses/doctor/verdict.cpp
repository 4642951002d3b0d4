#include "ulysses/doctor/verdict.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "ulysses/base/text.h"
#include "ulysses/doctor/messages.h"
#include "ulysses/doctor/tensors.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::doctor {
namespace {

using base::cat;
using base::join;

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
  std::vector<int64_t> raised, crashed, hung, released, declined;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const auto r = static_cast<int64_t>(rank);
    const Outcome outcome = own_outcome(answers[rank]);
    if (outcome == Outcome::kRaised) raised.push_back(r);
    if (outcome == Outcome::kCrashed) crashed.push_back(r);
    if (outcome == Outcome::kHung) hung.push_back(r);
    if (outcome == Outcome::kReleased) released.push_back(r);
    if (outcome == Outcome::kDeclined) declined.push_back(r);
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
  } else if (declined.size() == answers.size()) {
    set(VerdictKind::kRefused, declined, text(declined));
  }
  return verdict;
}

// Sizes [B, S, H, D] as they are in the case's format.
std::string shape_text(const Case& c, std::vector<int64_t> sizes) {
  const auto dim = static_cast<size_t>(contract::sequence_dim(c.qkv_format));
  if (sizes.size() == 4) std::swap(sizes[1], sizes[dim]);
  return sizes_text(sizes);
}

// What is off with a result's shape or dtype, whatever its values are.
std::string out_problem(const Question& question, std::string_view name, const at::Tensor& out,
                        const std::vector<int64_t>& wanted) {
  const Case& c = question.c;
  const bool right = out.sizes() == at::IntArrayRef(wanted);
  const std::string shapes = cat(shape_text(c, out.sizes().vec()), " instead of ", shape_text(c, wanted),
                                 c.qkv_format == "bshd" ? "" : cat(" (qkv_format=\"", c.qkv_format, "\")"));
  if (!right && out.dim() == 4 && out.numel() == c10::multiply_integers(wanted))
    return cat(name == "out" ? "the output" : name, " is restored along the wrong dimension: shape ", shapes);
  if (!right) return cat(name, " has shape ", shapes);
  if (out.scalar_type() != question.q.scalar_type())
    return cat(name, " is ", processors::dtype_name(out.scalar_type()), " for ", c.dtype, " inputs");
  return "";
}

std::string lse_problem(std::string_view name, const at::Tensor& lse, const std::vector<int64_t>& wanted) {
  if (lse.defined() && lse.sizes() == at::IntArrayRef(wanted)) return "";
  return cat(name, " has shape ", lse.defined() ? sizes_text(lse.sizes()) : std::string("none"), " instead of ",
             sizes_text(wanted), " (batch, heads, rows)");
}

// What keeps the tensors of one rank from being compared, or is wrong whatever their values are.
std::string form_problem(const Question& question, const RankAnswer& answer, int64_t rank) {
  const Case& c = question.c;
  const int64_t rows = c.padded_lengths[static_cast<size_t>(rank)];
  if (!answer.violation.empty()) return answer.violation;
  if (!answer.out.defined()) return "it returns nothing";
  std::string problem = out_problem(question, "out", answer.out, {c.batch, rows, c.num_heads, c.value_head_dim});
  if (problem.empty() && c.return_lse) problem = lse_problem("lse", answer.lse, {c.batch, c.num_heads, rows});
  if (problem.empty() && c.text_len > 0) {
    if (!answer.text_out.defined()) return "it returns no output of the joint tokens: (out, joint_out) is wanted";
    problem = out_problem(question, "joint_out", answer.text_out, {c.batch, c.text_len, c.num_heads, c.value_head_dim});
    if (problem.empty() && c.return_lse)
      problem = lse_problem("joint_lse", answer.text_lse, {c.batch, c.num_heads, c.text_len});
  }
  return problem.empty() ? padding_problem(c, "out", answer.out, rank) : problem;
}

using Member = at::Tensor RankAnswer::*;

// A tensor of one rank, float64; zeros where it gave none: no gradient came.
at::Tensor of_rank(const RankAnswer& answer, Member member, const std::vector<int64_t>& sizes) {
  const at::Tensor& x = answer.*member;
  return x.defined() ? x.to(at::kDouble) : at::zeros(sizes, at::kDouble);
}

// Rows of every rank in token order. `lengths` are the real rows.
at::Tensor rows_of_all(const std::vector<RankAnswer>& answers, Member member, const std::vector<int64_t>& lengths,
                       const at::Tensor& like) {
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    std::vector<int64_t> sizes = like.sizes().vec();
    sizes[1] = lengths[rank];
    parts.push_back(of_rank(answers[rank], member, sizes).narrow(1, 0, lengths[rank]));
  }
  return at::cat(parts, 1);
}

// The gradient of what every rank holds alike; undefined where there is no such input.
at::Tensor sum_of_all(const std::vector<RankAnswer>& answers, Member member, const at::Tensor& like) {
  if (!like.defined()) return {};
  at::Tensor sum = at::zeros(like.sizes(), at::kDouble);
  for (const RankAnswer& answer : answers) sum = sum + of_rank(answer, member, like.sizes().vec());
  return sum;
}

// What every rank must return whole, [W, ...].
at::Tensor each_of_all(const std::vector<RankAnswer>& answers, Member member) {
  std::vector<at::Tensor> parts;
  for (const RankAnswer& answer : answers) parts.push_back((answer.*member).to(at::kDouble));
  return at::stack(parts);
}

void collect_results(const Question& question, Observation& seen) {
  const Case& c = question.c;
  seen.out = rows_of_all(seen.answers, &RankAnswer::out, c.lengths, question.grad_out);
  if (c.text_len > 0) seen.text_out = each_of_all(seen.answers, &RankAnswer::text_out);
  if (!c.return_lse) return;
  for (RankAnswer& answer : seen.answers) {
    answer.lse = by_tokens(answer.lse);
    if (c.text_len > 0) answer.text_lse = by_tokens(answer.text_lse);
  }
  seen.lse = rows_of_all(seen.answers, &RankAnswer::lse, c.lengths, question.q.narrow(3, 0, 1));
  if (c.text_len > 0) seen.text_lse = each_of_all(seen.answers, &RankAnswer::text_lse);
}

void collect_gradients(const Question& question, Observation& seen) {
  const Case& c = question.c;
  const auto of_keys = [&](Member member, const at::Tensor& like) {
    if (c.replicated_kv) return sum_of_all(seen.answers, member, like);
    return rows_of_all(seen.answers, member, c.kv_lengths, like);
  };
  seen.dq = rows_of_all(seen.answers, &RankAnswer::dq, c.lengths, question.q);
  seen.dk = of_keys(&RankAnswer::dk, question.k);
  seen.dv = of_keys(&RankAnswer::dv, question.v);
  seen.text_dq = sum_of_all(seen.answers, &RankAnswer::text_dq, question.text_q);
  seen.text_dk = sum_of_all(seen.answers, &RankAnswer::text_dk, question.text_k);
  seen.text_dv = sum_of_all(seen.answers, &RankAnswer::text_dv, question.text_v);
  if (c.mask_grad) seen.dmask = sum_of_all(seen.answers, &RankAnswer::dmask, question.mask);
  seen.dsinks = sum_of_all(seen.answers, &RankAnswer::dsinks, question.sinks);
}

}  // namespace

std::string_view to_string(VerdictKind kind) {
  constexpr std::array<std::string_view, 7> kNames = {"ok",   "refused",       "wrong",          "crashed",
                                                      "hung", "one_rank_only", "unclear_message"};
  return kNames[static_cast<size_t>(kind)];
}

std::string padding_problem(const Case& c, std::string_view name, const at::Tensor& x, int64_t rank) {
  const int64_t real = c.lengths[static_cast<size_t>(rank)], rows = c.padded_lengths[static_cast<size_t>(rank)];
  if (!x.defined() || x.dim() != 4 || x.size(1) != rows || rows == real) return "";
  const double largest = x.narrow(1, real, rows - real).to(at::kDouble).abs().max().item<double>();
  return largest == 0 ? "" : cat("the padding rows of ", name, " are not zero");
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
  collect_results(question, seen);
  if (c.backward) collect_gradients(question, seen);
  return seen;
}

}  // namespace ulysses::doctor
