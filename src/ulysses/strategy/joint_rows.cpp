#include "ulysses/strategy/joint_rows.h"

#include <ATen/ops/cat.h>

#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {

namespace {

// Else it lies between the rank's own rows and the joint ones.
bool padding_is_last(const AttentionPlan& plan) { return plan.joint_first || plan.joint_len == 0; }

}  // namespace

at::Tensor own_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t length, int64_t dim) {
  return shard.size(dim) == length ? shard : shard.narrow(dim, plan.first_position(), length);
}

at::Tensor joint_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t dim) {
  return shard.narrow(dim, plan.joint_first ? 0 : shard.size(dim) - plan.joint_len, plan.joint_len);
}

at::Tensor real_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t length, int64_t dim) {
  const int64_t rows = shard.size(dim) - plan.joint_len;
  const bool in_one_piece = padding_is_last(plan) || rows == length;
  if (in_one_piece) return shard.narrow(dim, 0, length + plan.joint_len);
  return beside(plan, joint_rows(plan, shard, dim), own_rows(plan, shard, length, dim), dim);
}

at::Tensor beside(const AttentionPlan& plan, const at::Tensor& joint, const at::Tensor& own, int64_t dim) {
  if (plan.joint_len == 0) return own;
  return plan.joint_first ? at::cat({joint, own}, dim) : at::cat({own, joint}, dim);
}

at::Tensor shard_of(const AttentionPlan& plan, const at::Tensor& real, int64_t rows, int64_t dim, double fill) {
  if (padding_is_last(plan)) return pad_tokens(real, plan.joint_len + rows, dim, fill);
  const at::Tensor own = own_rows(plan, real, real.size(dim) - plan.joint_len, dim);
  return beside(plan, joint_rows(plan, real, dim), pad_tokens(own, rows, dim, fill), dim);
}

}  // namespace ulysses::strategy
