#pragma once

#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// Attention sinks: one more logit per head in every row's softmax, with a value of zero. A sink is thus a key like any
// other and is merged by lse after the kernel: lse' = logaddexp(lse, sink), out' = out · exp(lse − lse').
// Shapes:  out [B, S, h, D_v], lse [B, h, S], sinks [h] of any float dtype.
// Source:  gpt-oss (learned sinks); StreamingLLM (arXiv 2309.17453) for why heads want one.
KernelOutput add_sinks(const KernelOutput& seen, const at::Tensor& sinks);

// From the out and lse with sinks: dsinks[h] = Σ exp(sink − lse) · (grad_lse − ⟨grad_out, out⟩), in sinks' dtype.
at::Tensor sinks_grad(const at::Tensor& grad_out, const at::Tensor& grad_lse, const at::Tensor& out,
                      const at::Tensor& lse, const at::Tensor& sinks);

}  // namespace ulysses::kernels
