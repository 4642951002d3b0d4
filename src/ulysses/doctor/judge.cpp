// judge: every tensor against float64.
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ulysses/base/text.h"
#include "ulysses/doctor/duality.h"
#include "ulysses/doctor/tensors.h"
#include "ulysses/doctor/verdict.h"

namespace ulysses::doctor {
namespace {

using base::cat;

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

// What the rows of a tensor are.
enum class Rows {
  kQueries,   // [B, S, H, ·]
  kKeys,      // [B, S_kv, H_kv, ·]
  kShared,    // [B, T, H | H_kv, ·] of tokens that every rank holds, the sum over the ranks
  kEachText,  // [W, B, T, H, ·], of each rank
  kMask,      // no rows: of all tokens
  kHeads,     // [1, 1, H, 1]
};

// One tensor against its reference, folded into the verdict if it is the worst so far.
struct Comparison {
  const Case& c;
  Verdict& verdict;
  double worst = 0;  // error / allowed

  // `single`: the same by one process in the case's dtype.
  void compare(std::string_view name, Rows rows, const at::Tensor& got, const at::Tensor& reference,
               const at::Tensor& single, double bound) {
    if (reference.numel() == 0) return;
    const at::Tensor wanted = reference.expand(got.sizes());
    const at::Tensor clean = wanted.nan_to_num(0, 0, 0);
    const double largest = clean.abs().max().item<double>();
    const double single_error = (single.to(at::kDouble).nan_to_num(0, 0, 0) - clean).abs().max().item<double>();
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
    verdict.is_forward = verdict.is_forward || name.ends_with("out") || name.ends_with("lse");
    verdict.tokens = verdict.heads = verdict.ranks = "";
    if (rows != Rows::kMask) locate(rows, error > allowed);
    const auto where = [](std::string_view what, const std::string& places) {
      return places.empty() ? std::string() : cat(", ", what, " ", places);
    };
    const bool of_keys = name.ends_with("dk") || name.ends_with("dv");
    const std::string places = where(name.starts_with("joint") ? "joint tokens" : "tokens", verdict.tokens) +
                               where(of_keys ? "KV heads" : "heads", verdict.heads) + where("ranks", verdict.ranks);
    verdict.message = cat(name, " is off by ", verdict.error, ", allowed ", verdict.allowed,
                          places.empty() ? "" : ", in" + places.substr(1));
  }

  void locate(Rows rows, const at::Tensor& bad) {
    verdict.heads = ranges(doctor::places(bad.flatten(0, -3).any(2).any(0)));
    if (rows == Rows::kHeads) return;
    const at::Tensor tokens = bad.any(-1).any(-1).flatten(0, -2).any(0);
    verdict.tokens = ranges(doctor::places(tokens));
    if (rows == Rows::kShared) return;
    std::vector<int64_t> ranks;
    for (int64_t rank = 0; rank < c.cp_size; ++rank)
      if (is_wrong_on(rows, bad, tokens, rank)) ranks.push_back(rank);
    verdict.ranks = ranges(ranks);
  }

  bool is_wrong_on(Rows rows, const at::Tensor& bad, const at::Tensor& tokens, int64_t rank) const {
    if (rows == Rows::kEachText) return bad[rank].any().item<bool>();
    const bool of_keys = rows == Rows::kKeys;
    const int64_t begin = of_keys ? c.kv_token_begin(rank) : c.token_begin(rank);
    const int64_t length = (of_keys ? c.kv_lengths : c.lengths)[static_cast<size_t>(rank)];
    return tokens.narrow(0, begin, length).any().item<bool>();
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

// Every tensor that this case asks for.
void compare_all(const Question& question, const Observation& seen, Verdict& verdict) {
  const Case& c = question.c;
  const at::ScalarType dtype = question.q.scalar_type();
  const Reference wanted = attention_reference(question), single = attention_reference(question, dtype);
  // Scores of hundreds lose as many digits in the exponential.
  const double bound = bound_of(dtype) * std::max(1.0, c.magnitude / 10);
  const double lse_bound = dtype == at::kDouble ? bound : 1e-4;
  Comparison comparison{c, verdict};
  const double grad_bound = at::isReducedFloatingType(dtype) ? 2 * bound : bound;
  const auto compare = [&](std::string_view name, Rows rows, const at::Tensor& got, at::Tensor Reference::*member) {
    const double allowed = name.ends_with("out") ? bound : grad_bound;
    comparison.compare(name, rows, got, wanted.*member, single.*member, allowed);
  };
  const auto compare_lse = [&](std::string_view name, Rows rows, const at::Tensor& got, at::Tensor Reference::*member) {
    comparison.compare(name, rows, got, by_tokens(wanted.*member), by_tokens(single.*member), lse_bound);
  };
  const bool text = c.text_len > 0;
  compare("out", Rows::kQueries, seen.out, &Reference::out);
  if (c.return_lse) compare_lse("lse", Rows::kQueries, seen.lse, &Reference::lse);
  if (text) compare("joint_out", Rows::kEachText, seen.text_out, &Reference::text_out);
  if (text && c.return_lse) compare_lse("joint_lse", Rows::kEachText, seen.text_lse, &Reference::text_lse);
  if (!c.backward) return;
  const auto asked = [&](char name) { return c.grad_of.find(name) != std::string::npos; };
  const Rows keys = c.replicated_kv ? Rows::kShared : Rows::kKeys;
  if (asked('q')) compare("dq", Rows::kQueries, seen.dq, &Reference::dq);
  if (asked('k')) compare("dk", keys, seen.dk, &Reference::dk);
  if (asked('v')) compare("dv", keys, seen.dv, &Reference::dv);
  if (text && asked('q')) compare("joint_dq", Rows::kShared, seen.text_dq, &Reference::text_dq);
  if (text && asked('k')) compare("joint_dk", Rows::kShared, seen.text_dk, &Reference::text_dk);
  if (text && asked('v')) compare("joint_dv", Rows::kShared, seen.text_dv, &Reference::text_dv);
  if (c.mask_grad) compare("dmask", Rows::kMask, seen.dmask, &Reference::dmask);
  if (!c.sinks) return;
  const auto per_head = [](const at::Tensor& x) { return x.view({1, 1, -1, 1}); };
  comparison.compare("dsinks", Rows::kHeads, per_head(seen.dsinks), per_head(wanted.dsinks), per_head(single.dsinks),
                     grad_bound);
}

}  // namespace

Verdict judge(const Question& question, const Observation& seen) {
  if (!seen.complete()) return seen.failure;
  const Case& c = question.c;
  if (c.dropout_p > 0) return judge_dropout(question, seen);
  Verdict verdict;
  compare_all(question, seen, verdict);
  for (int64_t rank = 0; rank < c.cp_size && verdict.kind == VerdictKind::kOk; ++rank) {
    const RankAnswer& answer = seen.answers[static_cast<size_t>(rank)];
    const bool keys_too = c.kv_lengths == c.lengths && !c.replicated_kv;
    const at::Tensor none;
    for (const auto& [name, x] :
         {std::pair{"dq", answer.dq}, {"dk", keys_too ? answer.dk : none}, {"dv", keys_too ? answer.dv : none}})
      if (const std::string problem = padding_problem(c, name, x, rank); !problem.empty())
        return {VerdictKind::kWrong, -1, -1, "", cat("rank ", rank, ": ", problem), "", "", cat(rank), false};
  }
  return verdict;
}

}  // namespace ulysses::doctor
