#include "ulysses/kernels/sinks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logaddexp.h>

#include "ulysses/kernels/merge_lse.h"

namespace ulysses::kernels {

namespace {
// [h] → [1, h, 1], in the type of lse.
at::Tensor per_head(const at::Tensor& sinks, const at::Tensor& lse) {
  return sinks.to(lse.scalar_type()).unsqueeze(0).unsqueeze(-1);
}
}  // namespace

KernelOutput add_sinks(const KernelOutput& seen, const at::Tensor& sinks) {
  const at::Tensor lse = at::logaddexp(seen.lse, per_head(sinks, seen.lse));
  const at::Tensor weight = at::exp(seen.lse - lse_for_backward(lse));
  return {(seen.out * per_row(weight)).to(seen.out.scalar_type()), lse};
}

at::Tensor sinks_grad(const at::Tensor& grad_out, const at::Tensor& grad_lse, const at::Tensor& out,
                      const at::Tensor& lse, const at::Tensor& sinks) {
  const at::ScalarType dtype = lse.scalar_type();
  const at::Tensor weight = at::exp(per_head(sinks, lse) - lse_for_backward(lse));
  at::Tensor grad = (grad_out.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).neg();
  if (grad_lse.defined()) grad = grad + grad_of_seen_rows(grad_lse, lse);
  return (weight * grad).sum(at::IntArrayRef{0, 2}).to(sinks.scalar_type());
}

}  // namespace ulysses::kernels
