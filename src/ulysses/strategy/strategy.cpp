#include "ulysses/strategy/strategy.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace ulysses::strategy {

int64_t LocalWork::num_tokens() const {
  int64_t tokens = 0;
  for (const partition::Range& positions : q_positions) tokens += positions.size();
  return tokens;
}

const Strategy& strategy_for(std::string_view name, const AttentionPlan& plan) {
  if (plan.cp_size == 1 || plan.replicated_kv) return local_strategy();
  return name == allgather_kv_strategy().name() ? allgather_kv_strategy() : ulysses_strategy();
}

at::Tensor pad_tokens(const at::Tensor& tensor, int64_t rows) {
  if (tensor.size(1) == rows) return tensor;
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[1] = rows;
  at::Tensor padded = at::zeros(sizes, tensor.options());
  padded.narrow(1, 0, tensor.size(1)).copy_(tensor);
  return padded;
}

kernels::KernelOutput pad_rows(const kernels::KernelOutput& local, int64_t rows, bool with_lse) {
  kernels::KernelOutput result{pad_tokens(local.out, rows), {}};
  if (!with_lse) return result;
  result.lse = local.lse;
  const int64_t length = local.lse.size(2);
  if (length == rows) return result;
  result.lse = at::full({local.lse.size(0), local.lse.size(1), rows}, -std::numeric_limits<double>::infinity(),
                        local.lse.options());
  result.lse.narrow(2, 0, length).copy_(local.lse);
  return result;
}

}  // namespace ulysses::strategy
