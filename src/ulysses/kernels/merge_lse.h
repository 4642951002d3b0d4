#pragma once

#include <ATen/core/Tensor.h>

#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// The type in which partial results are summed: float64 for float64, float32 for every other type.
at::ScalarType accumulate_dtype(at::ScalarType dtype);

// Attention of the same queries over the union of disjoint sets of keys, from the result over each. Differentiable
// through every out and lse.
// Shapes:  outs n ≥ 1 times [B, S, h, D_v], lses n times [B, h, S] → out and lse of the same shapes.
// Dtype:   sums in the accumulate_dtype of outs[0] and rounds once, to outs[0]'s dtype; lse stays in the
//          accumulate_dtype.
// An lse of −inf (no keys) takes no weight and gets no gradient: merging with (0, −inf) gives the other side's bits;
// −inf on all sides gives out 0 and lse −inf.
// Source:  online softmax (arXiv 1805.02867) §3; deviation: the weights are normalised by their own sum, which keeps
//          them summing to one however far the lses lie apart.
// Errors:  CP020, CP021, CP024.
KernelOutput merge_attention(at::TensorList outs, at::TensorList lses);

// [B, h, S] → [B, S, h, 1], to scale the rows of an output.
at::Tensor per_row(const at::Tensor& lse);

// lse as a backward may use it: +inf where it was −inf, so that exp(score − lse) is 0 there and not NaN.
at::Tensor lse_for_backward(const at::Tensor& lse);

// grad_lse with 0 on the rows whose lse is −inf: no input moves it, whatever gradient arrives.
at::Tensor grad_of_seen_rows(const at::Tensor& grad_lse, const at::Tensor& lse);

}  // namespace ulysses::kernels
