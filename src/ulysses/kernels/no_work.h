#pragma once

#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// Attention over nothing: no batch, query, key, head or head dimension. Torch's fused ops end the process on such
// inputs (an integer division by zero), so they are answered here and never reach one.
bool has_no_work(const at::Tensor& q, const at::Tensor& k);

// What rows without keys get: out 0 and lse −inf.
// Shapes:  out [B, Sq, h, D_v] contiguous in q's dtype, lse [B, h, Sq] contiguous.
KernelOutput output_without_keys(const at::Tensor& q, const at::Tensor& v);
KernelGrads zero_grads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

}  // namespace ulysses::kernels
