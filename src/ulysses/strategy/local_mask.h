#pragma once

#include <ATen/core/Tensor.h>

#include "ulysses/exchange/group.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {

// What this rank's attention reads of a mask.
struct LocalMask {
  at::Tensor mask;      // [B|1, h|1, Sq|1, Skv]: this rank's heads, all keys; undefined without a mask
  int64_t q_begin = 0;  // global position of its first row
};

// A mask as the caller passed it ([B, S_kv] or 4-D, axes as plan.mask says) → a view of it, or of what is gathered
// where an axis is local and other ranks' part is needed. Joint keys behind their valid length are hidden in it too.
// Comm:    one gather for each such axis, of this rank's part; none if the same tensor, unchanged, was gathered over
//          this group by the same lengths before (exchange/gather_cache.h).
LocalMask local_mask(const at::Tensor& mask, const AttentionPlan& plan, const Strategy& strategy, const LocalWork& work,
                     const at::Device& device, const exchange::Group& group);

// Rows of joint tokens behind their sequence's valid length: out 0 and lse −inf, which makes their gradients zero.
// Takes and returns the local result; differentiable through out.
kernels::KernelOutput hide_invalid_rows(const kernels::KernelOutput& local, const AttentionPlan& plan,
                                        const LocalWork& work);

// Whether local_mask would gather nothing because it did so before. Ranks must agree on this: it decides a collective.
bool mask_is_gathered(const at::Tensor& mask, const AttentionPlan& plan, const Strategy& strategy,
                      const exchange::Group& group);

// The gradient of a LocalMask's rows and heads → of the whole mask, zero elsewhere. Only for masks without local axes.
at::Tensor grad_of_mask(const at::Tensor& mask, const at::Tensor& grad, const LocalMask& local, const LocalWork& work);

}  // namespace ulysses::strategy
