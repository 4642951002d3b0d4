#pragma once

#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// Attention of local queries at global positions [q_begin, q_begin + Sq) over keys at [kv_begin, kv_begin + Skv).
struct LocalAttentionOptions {
  bool is_causal = false;  // key position ≤ query position
  double softmax_scale = 1.0;
  int64_t q_begin = 0;
  int64_t kv_begin = 0;
};

// Runs a kernel over the full and diagonal blocks that (is_causal, positions) leave, merging by lse in float32; empty
// inputs never reach the kernel. Rows that see no key: out 0, lse −inf, zero gradients.
// Shapes:  as Kernel, plus any of B, Sq, Skv, h may be 0.
KernelOutput local_attention(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const LocalAttentionOptions& options);
KernelGrads local_attention_backward(const Kernel& kernel, const at::Tensor& grad_out, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                     const at::Tensor& lse, const LocalAttentionOptions& options);

}  // namespace ulysses::kernels
