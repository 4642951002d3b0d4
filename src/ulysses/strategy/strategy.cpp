#include "ulysses/strategy/strategy.h"

#include <ATen/ops/full.h>

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

at::Tensor pad_tokens(const at::Tensor& tensor, int64_t rows, int64_t dim, double fill) {
  if (tensor.size(dim) == rows) return tensor;
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = rows;
  at::Tensor padded = at::full(sizes, fill, tensor.options());
  padded.narrow(dim, 0, tensor.size(dim)).copy_(tensor);
  return padded;
}

kernels::KernelOutput pad_rows(const kernels::KernelOutput& local, int64_t rows, bool with_lse) {
  return {pad_tokens(local.out, rows), with_lse ? pad_tokens(local.lse, rows, 2, kNoKeys) : at::Tensor()};
}

}  // namespace ulysses::strategy
