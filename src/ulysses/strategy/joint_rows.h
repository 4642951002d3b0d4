#pragma once

#include <ATen/core/Tensor.h>

#include "ulysses/kernels/kernel.h"
#include "ulysses/strategy/plan.h"

namespace ulysses::strategy {

// A shard with joint tokens has T rows more than the rank's own, in front or behind: [T | rows] or [rows | T]. These
// take it apart and put it together; without joint tokens they cost nothing. `dim` holds the rows.

// The rank's own real rows. A view, or the shard itself where it has no others.
at::Tensor own_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t length, int64_t dim = 1);
// The joint rows. A view.
at::Tensor joint_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t dim = 1);
// Both, without padding rows; a view where nothing lies between them.
at::Tensor real_rows(const AttentionPlan& plan, const at::Tensor& shard, int64_t length, int64_t dim = 1);
// [joint | own] or [own | joint].
at::Tensor beside(const AttentionPlan& plan, const at::Tensor& joint, const at::Tensor& own, int64_t dim = 1);

// The way back from real_rows(): a shard with `rows` rows of the rank's own, `fill` in those that are padding.
at::Tensor shard_of(const AttentionPlan& plan, const at::Tensor& real, int64_t rows, int64_t dim = 1,
                    double fill = 0.0);

}  // namespace ulysses::strategy
