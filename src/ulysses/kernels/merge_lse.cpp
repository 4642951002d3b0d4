#include "ulysses/kernels/merge_lse.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/log.h>
#include <ATen/ops/maximum.h>

#include <limits>

namespace ulysses::kernels {

namespace {
constexpr double kInf = std::numeric_limits<double>::infinity();

// [B, h, S] → [B, S, h, 1], to scale the rows of an output.
at::Tensor per_row(const at::Tensor& lse) { return lse.transpose(1, 2).unsqueeze(-1); }
}  // namespace

at::ScalarType accumulate_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

KernelOutput merge_lse(const KernelOutput& a, const KernelOutput& b) {
  const at::ScalarType dtype = accumulate_dtype(a.out.scalar_type());
  const at::Tensor lse_a = a.lse.to(dtype);
  const at::Tensor lse_b = b.lse.to(dtype);

  const at::Tensor highest = at::maximum(lse_a, lse_b);
  // Rows without keys on either side: any finite reference leaves both weights at exp(−inf) = 0.
  const at::Tensor reference = highest.masked_fill(at::isneginf(highest), 0.0);
  const at::Tensor weight_a = at::exp(lse_a - reference);
  const at::Tensor weight_b = at::exp(lse_b - reference);
  const at::Tensor total = weight_a + weight_b;
  const at::Tensor divisor = total.masked_fill(total == 0.0, 1.0);

  at::Tensor out = a.out.to(dtype) * per_row(weight_a / divisor) + b.out.to(dtype) * per_row(weight_b / divisor);
  return {out, reference + at::log(total)};
}

at::Tensor lse_for_backward(const at::Tensor& lse) { return lse.masked_fill(at::isneginf(lse), kInf); }

}  // namespace ulysses::kernels
