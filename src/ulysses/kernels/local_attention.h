#pragma once

#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// Attention of local queries at global positions [q_begin, q_begin + Sq) over keys at [kv_begin, kv_begin + Skv).
struct LocalAttentionOptions {
  bool is_causal = false;  // key position ≤ query position
  double softmax_scale = 1.0;
  int64_t q_begin = 0;
  int64_t kv_begin = 0;
  at::Tensor attn_mask;          // as in KernelOptions, of exactly these query rows and keys
  double softcap = 0.0;          // as in KernelOptions
  at::Tensor sinks;              // [h]: a logit more in every row's softmax, with value 0; undefined: none
  bool mask_needs_grad = false;  // backward returns dmask
};

// Runs a kernel over the full and diagonal blocks that (is_causal, positions) leave, merging by lse in float32, or once
// if it takes any offset of a causal mask; empty inputs never reach it. Rows that see no key: out 0, lse −inf (the sink
// where there is one), zero gradients. Sinks count once per call: over several sets of keys, only one of the calls may
// have them. Shapes:  as Kernel, plus any of B, Sq, Skv, h may be 0.
KernelOutput local_attention(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const LocalAttentionOptions& options);

// The gradients from the out and lse that local_attention returned. grad_lse [B, h, Sq] is undefined where nobody asked
// for lse; it is ignored on rows whose lse is −inf. dmask has the mask's shape and dtype, dsinks those of sinks.
// With mask_needs_grad, or grad_lse that it does not take, the math kernel runs in place of `kernel`, because no fused
// op has a way in for either: the whole score matrix is held.
KernelGrads local_attention_backward(const Kernel& kernel, const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                     const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& out, const at::Tensor& lse,
                                     const LocalAttentionOptions& options);

}  // namespace ulysses::kernels
