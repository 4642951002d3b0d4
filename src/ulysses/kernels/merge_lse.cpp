#include "ulysses/kernels/merge_lse.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/log.h>
#include <ATen/ops/maximum.h>

#include <limits>
#include <string>
#include <vector>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/contract/rules.h"

namespace ulysses::kernels {

namespace {

using base::cat;
using contract::invalid;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Sizes stay symbolic: the function is traced too.
void check_result(std::vector<base::Problem>& problems, at::TensorList outs, at::TensorList lses, size_t i) {
  const auto out = outs[0].sym_sizes();
  if (outs[i].sym_sizes() != out) {
    problems.push_back(invalid("CP024", cat("outs[", i, "] has sizes ", outs[i].sym_sizes(), ", outs[0] ", out),
                               "All results are for the same queries", cat("outs[", i, "] of shape ", out)));
  }
  if (outs[i].scalar_type() != outs[0].scalar_type() || !outs[i].is_floating_point() || !lses[i].is_floating_point()) {
    const auto name = [](const at::Tensor& x) { return c10::getDtypeNames(x.scalar_type()).first; };
    problems.push_back(
        invalid("CP021",
                cat("outs[", i, "] is ", name(outs[i]), ", outs[0] ", name(outs[0]), ", lses[", i, "] ", name(lses[i])),
                "The outs have one floating-point dtype, an lse has any", "cast them"));
  }
  const std::vector<c10::SymInt> lse = {out[0], out[2], out[1]};
  if (lses[i].sym_sizes() == c10::SymIntArrayRef(lse)) return;
  const bool swapped = lses[i].dim() == 3 && lses[i].transpose(1, 2).sym_sizes() == c10::SymIntArrayRef(lse);
  problems.push_back(invalid(
      "CP024", cat("lses[", i, "] has sizes ", lses[i].sym_sizes(), " for an out of ", out),
      "An lse is [B, H, S] where its out is [B, S, H, D_v]",
      swapped ? cat("lses[", i, "].transpose(1, 2)") : cat("lses[", i, "] of shape ", c10::SymIntArrayRef(lse))));
}

void check_results(at::TensorList outs, at::TensorList lses) {
  std::vector<base::Problem> problems;
  if (outs.empty() || outs.size() != lses.size()) {
    problems.push_back(invalid("CP024", cat("there are ", outs.size(), " outs and ", lses.size(), " lses"),
                               "Each result is one out and its lse, and there is at least one", "one lse per out"));
  } else if (outs[0].dim() != 4) {
    problems.push_back(invalid("CP020", cat("outs[0] has ", outs[0].dim(), " dimensions, sizes ", outs[0].sym_sizes()),
                               "An out is 4-D", "outs of shape [B, S, H, D_v]"));
  } else {
    for (size_t i = 0; i < outs.size(); ++i) check_result(problems, outs, lses, i);
  }
  base::raise_if_any(std::move(problems), "merge_attention");
}

}  // namespace

at::ScalarType accumulate_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor per_row(const at::Tensor& lse) { return lse.transpose(1, 2).unsqueeze(-1); }

// The reference is detached: out and lse don't depend on it, only their rounding does. Rows without keys on any side
// take a reference of 0, which leaves all weights at exp(−inf) = 0, and a divisor of 1; no NaN arises in a gradient.
KernelOutput merge_attention(at::TensorList outs, at::TensorList lses) {
  check_results(outs, lses);
  const at::ScalarType dtype = accumulate_dtype(outs[0].scalar_type());
  std::vector<at::Tensor> weights;
  for (const at::Tensor& lse : lses) weights.push_back(lse.to(dtype));
  at::Tensor highest = weights[0];
  for (size_t i = 1; i < weights.size(); ++i) highest = at::maximum(highest, weights[i]);
  if (highest.requires_grad()) highest = highest.detach();
  const at::Tensor no_keys = at::isneginf(highest);
  const at::Tensor reference = highest.masked_fill(no_keys, 0.0);

  for (at::Tensor& weight : weights) weight = at::exp(weight - reference);
  at::Tensor total = weights[0];
  for (size_t i = 1; i < weights.size(); ++i) total = total + weights[i];
  const at::Tensor divisor = total.masked_fill(no_keys, 1.0);

  at::Tensor out;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor part = outs[i].to(dtype) * per_row(weights[i] / divisor);
    out = i == 0 ? part : out + part;
  }
  return {out.to(outs[0].scalar_type()), (reference + at::log(divisor)).masked_fill_(no_keys, -kInf)};
}

at::Tensor lse_for_backward(const at::Tensor& lse) { return lse.masked_fill(at::isneginf(lse), kInf); }

at::Tensor grad_of_seen_rows(const at::Tensor& grad_lse, const at::Tensor& lse) {
  return grad_lse.masked_fill(at::isneginf(lse), 0.0);
}

}  // namespace ulysses::kernels
