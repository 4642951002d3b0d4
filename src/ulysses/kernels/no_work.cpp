#include "ulysses/kernels/no_work.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ulysses/kernels/merge_lse.h"

namespace ulysses::kernels {

bool has_no_work(const at::Tensor& q, const at::Tensor& k) { return q.numel() == 0 || k.numel() == 0; }

KernelOutput output_without_keys(const at::Tensor& q, const at::Tensor& v) {
  const auto lse_options = q.options().dtype(accumulate_dtype(q.scalar_type()));
  return {at::zeros({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options()),
          at::full({q.size(0), q.size(2), q.size(1)}, -std::numeric_limits<double>::infinity(), lse_options)};
}

KernelGrads zero_grads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return {
      at::zeros(q.sizes(), q.options()), at::zeros(k.sizes(), k.options()), at::zeros(v.sizes(), v.options()), {}, {}};
}

}  // namespace ulysses::kernels
