#pragma once

#include <ATen/TensorOperators.h>

#include <iostream>

#include "reference_attention.h"
#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/local_attention.h"

// What the tests of our CPU kernel share. Where the processor, or ULYSSES_CPU_FEATURES, leaves it out, the same values
// are asked of the kernel that calls then get, and a line says so.
namespace ulysses::testing {

inline bool runs_here(const kernels::Kernel& kernel, at::ScalarType dtype) {
  kernels::KernelNeed need;
  need.dtype = dtype == at::kFloat ? "float32" : dtype == at::kHalf ? "float16" : "bfloat16";
  need.head_dim = need.v_head_dim = 64;
  return !kernel.refusal(need).has_value();
}

inline const kernels::Kernel& tested_kernel(at::ScalarType dtype) {
  const bool here = runs_here(kernels::cpu_flash_kernel(), dtype);
  const kernels::Kernel& kernel = here ? kernels::cpu_flash_kernel() : kernels::fused_cpu_kernel();
  static bool said[3] = {};
  bool& once = said[dtype == at::kFloat ? 0 : dtype == at::kHalf ? 1 : 2];
  if (!once) std::cout << "[   KERNEL ] " << at::toString(dtype) << ": " << kernel.name() << std::endl;
  once = true;
  return kernel;
}

inline const std::vector<at::ScalarType>& flash_dtypes() {
  static const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kBFloat16, at::kHalf};
  return dtypes;
}

inline kernels::LocalAttentionOptions local_options(const AttentionCase& c) {
  return {c.is_causal, c.softmax_scale, c.q_begin, c.kv_begin};
}

inline kernels::KernelOutput attend(const AttentionInputs& in, const AttentionCase& c) {
  return kernels::local_attention(tested_kernel(c.dtype), in.q, in.k, in.v, local_options(c));
}

inline AttentionResult attend_both_ways(const AttentionInputs& in, const AttentionCase& c,
                                        const at::Tensor& grad_lse = {}) {
  const auto [out, lse] = attend(in, c);
  const kernels::KernelGrads grads = kernels::local_attention_backward(tested_kernel(c.dtype), in.grad_out, grad_lse,
                                                                       in.q, in.k, in.v, out, lse, local_options(c));
  return {out, lse, grads.dq, grads.dk, grads.dv};
}

// The error that a dtype may show: float32 1e-5 as everywhere, 16-bit types two roundings of the largest number.
inline double allowed(at::ScalarType dtype, const at::Tensor& reference) {
  const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 2e-3 : 1.6e-2;
  return unit * std::max(1.0, max_abs(reference));
}

// dq and dk come from a difference, ⟨grad_out, v⟩ − ⟨grad_out, out⟩, whose terms grow like √D and keep the rounding of
// out; it is multiplied by the scale.
inline double allowed_of_scores(const AttentionCase& c, const at::Tensor& reference) {
  const double terms = std::abs(c.softmax_scale) * std::sqrt(static_cast<double>(c.head_dim));
  return std::max(1.0, terms) * allowed(c.dtype, reference);
}

inline void expect_near_float64(const AttentionResult& actual, const AttentionInputs& in, const AttentionCase& c) {
  const AttentionResult ref = reference_attention(in, c);
  EXPECT_EQ(actual.out.scalar_type(), c.dtype);
  expect_close("out", actual.out, ref.out, allowed(c.dtype, ref.out));
  expect_lse_close(actual.lse, ref.lse, c.dtype);
  expect_close("dq", actual.dq, ref.dq, allowed_of_scores(c, ref.dq));
  expect_close("dk", actual.dk, ref.dk, allowed_of_scores(c, ref.dk));
  expect_close("dv", actual.dv, ref.dv, allowed(c.dtype, ref.dv));
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); }

}  // namespace ulysses::testing
