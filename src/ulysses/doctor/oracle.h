#pragma once

#include <ATen/core/Tensor.h>

namespace ulysses::doctor {

// Plain attention of one process over the whole sequence, in float64 and in nobody's kernel; what everything is
// measured against.
// Shapes: q [B, Sq, H, D], k [B, Skv, H_kv, D], v [B, Skv, H_kv, D_v] → out [B, Sq, H, D_v]
at::Tensor oracle_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                            double softmax_scale);

struct OracleGrads {
  at::Tensor out, dq, dk, dv;
};

// The same with the gradients of ⟨grad_out, out⟩.
OracleGrads oracle_gradients(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             bool is_causal, double softmax_scale);

// Attention in which each of `cp_size` equal shards sees its own keys only: the fault that raises no error.
at::Tensor local_only_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t cp_size,
                                double softmax_scale);

}  // namespace ulysses::doctor
