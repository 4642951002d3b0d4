#include "ulysses/strategy/joint_rows.h"

#include <ATen/ops/cat.h>

#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {

at::Tensor own_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t length, int64_t dim) {
  return shard.narrow(dim, plan.first_position(), length);
}

at::Tensor joint_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t dim) {
  return shard.narrow(dim, plan.joint_first ? 0 : shard.size(dim) - plan.joint_len, plan.joint_len);
}

at::Tensor real_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t length, int64_t dim) {
  const int64_t rows = shard.size(dim) - plan.joint_len;
  const bool in_one_piece = plan.joint_first || plan.joint_len == 0 || rows == length;
  if (in_one_piece) return shard.narrow(dim, 0, length + plan.joint_len);
  return beside(plan, joint_rows(plan, shard, dim), own_rows(plan, shard, length, dim), dim);
}

at::Tensor beside(const AttentionPlan& plan, const at::Tensor& joint, const at::Tensor& own, int64_t dim) {
  if (plan.joint_len == 0) return own;
  return plan.joint_first ? at::cat({joint, own}, dim) : at::cat({own, joint}, dim);
}

kernels::KernelOutput shard_of(const AttentionPlan& plan, const kernels::KernelOutput& real) {
  const bool padding_is_last = plan.joint_first || plan.joint_len == 0;
  if (padding_is_last) return pad_rows(real, plan.joint_len + plan.rows, plan.return_lse);
  const auto part = [&](auto take) {
    return kernels::KernelOutput{take(real.out, 1), plan.return_lse ? take(real.lse, 2) : at::Tensor()};
  };
  const kernels::KernelOutput joint = part([&](const at::Tensor& x, int64_t dim) { return joint_rows(plan, x, dim); });
  const kernels::KernelOutput own =
      pad_rows(part([&](const at::Tensor& x, int64_t dim) { return own_rows(plan, x, plan.length(), dim); }), plan.rows,
               plan.return_lse);
  kernels::KernelOutput shard{beside(plan, joint.out, own.out), {}};
  if (plan.return_lse) shard.lse = beside(plan, joint.lse, own.lse, 2);
  return shard;
}

}  // namespace ulysses::strategy
