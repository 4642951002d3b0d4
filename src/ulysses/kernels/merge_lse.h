#pragma once

#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// The type in which partial results are summed: float64 for float64, float32 for every other type.
at::ScalarType accumulate_dtype(at::ScalarType dtype);

// Attention of the same queries over the union of two disjoint sets of keys, from the result over each.
// Shapes:  out [B, S, h, D_v], lse [B, h, S] (both results alike).
// Dtype:   out and lse come back in the accumulate_dtype of the inputs, so that a chain of merges rounds once, at the
//          caller's cast. An lse of −inf (no keys) takes no weight: merging with (0, −inf) gives the other side's bits;
//          −inf on both sides gives out 0 and lse −inf.
// Source:  online softmax (arXiv 1805.02867) §3; deviation: the weights are normalised by their own sum, which keeps
//          them summing to one however far the two lse lie apart.
KernelOutput merge_lse(const KernelOutput& a, const KernelOutput& b);

// lse as a backward may use it: +inf where it was −inf, so that exp(score − lse) is 0 there and not NaN.
at::Tensor lse_for_backward(const at::Tensor& lse);

}  // namespace ulysses::kernels
