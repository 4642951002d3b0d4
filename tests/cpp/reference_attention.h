#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "ulysses/kernels/kernel.h"

// An attention of our own in float64, independent of the kernels: plain softmax, KV heads picked by index, gradients
// from autograd. With it, random inputs and the project's tolerances.
namespace ulysses::testing {

struct AttentionCase {
  int64_t batch = 2, q_len = 7, kv_len = 7, heads = 4, kv_heads = 4, head_dim = 16, v_head_dim = 16;
  at::ScalarType dtype = at::kFloat;
  bool is_causal = false;
  int64_t q_begin = 0, kv_begin = 0;
  double softmax_scale = 0.3;
};

struct AttentionInputs {
  at::Tensor q, k, v, grad_out;  // BSHD, contiguous
};

struct AttentionResult {
  at::Tensor out, lse, dq, dk, dv;
};

inline std::string describe(const AttentionCase& c) {
  std::ostringstream text;
  text << at::toString(c.dtype) << " B=" << c.batch << " Sq=" << c.q_len << " Skv=" << c.kv_len << " H=" << c.heads
       << " H_kv=" << c.kv_heads << " D=" << c.head_dim << " D_v=" << c.v_head_dim << " causal=" << c.is_causal
       << " q_begin=" << c.q_begin << " kv_begin=" << c.kv_begin;
  return text.str();
}

inline at::Tensor random_tensor(at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

inline AttentionInputs random_inputs(const AttentionCase& c, uint64_t seed = 1) {
  return {random_tensor({c.batch, c.q_len, c.heads, c.head_dim}, c.dtype, seed),
          random_tensor({c.batch, c.kv_len, c.kv_heads, c.head_dim}, c.dtype, seed + 100),
          random_tensor({c.batch, c.kv_len, c.kv_heads, c.v_head_dim}, c.dtype, seed + 200),
          random_tensor({c.batch, c.q_len, c.heads, c.v_head_dim}, c.dtype, seed + 300)};
}

// Queries before the first key see nothing: the first row that does.
inline int64_t first_row_with_keys(const AttentionCase& c) {
  if (c.kv_len == 0) return c.q_len;
  return c.is_causal ? std::clamp<int64_t>(c.kv_begin - c.q_begin, 0, c.q_len) : 0;
}

// 0 where the key may be seen, −inf where not; [rows, keys] for the query rows from `first` on.
inline at::Tensor additive_mask(const AttentionCase& c, int64_t first, at::ScalarType dtype) {
  at::Tensor mask = at::zeros({c.q_len - first, c.kv_len}, at::kDouble);
  if (c.is_causal) {
    const at::Tensor q_positions = (at::arange(first, c.q_len, at::kLong) + c.q_begin).unsqueeze(1);
    const at::Tensor kv_positions = (at::arange(c.kv_len, at::kLong) + c.kv_begin).unsqueeze(0);
    mask.masked_fill_(kv_positions > q_positions, -std::numeric_limits<double>::infinity());
  }
  return mask.to(dtype);
}

inline AttentionResult reference_attention(const AttentionInputs& in, const AttentionCase& c) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().to(at::kDouble).clone().requires_grad_(true); };
  const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v);
  const int64_t first = first_row_with_keys(c);
  at::Tensor out = at::zeros({c.batch, c.q_len, c.heads, c.v_head_dim}, at::kDouble);
  at::Tensor lse = at::full({c.batch, c.heads, c.q_len}, -std::numeric_limits<double>::infinity(), at::kDouble);
  if (first == c.q_len || c.heads == 0 || c.batch == 0) {
    return {out, lse, at::zeros(q.sizes(), at::kDouble), at::zeros(k.sizes(), at::kDouble),
            at::zeros(v.sizes(), at::kDouble)};
  }
  const at::Tensor kv_of_head = at::arange(c.heads, at::kLong).floor_divide(c.heads / c.kv_heads);
  const at::Tensor q_rows = q.narrow(1, first, c.q_len - first).transpose(1, 2);
  const at::Tensor k_heads = k.index_select(2, kv_of_head).permute({0, 2, 3, 1});
  const at::Tensor v_heads = v.index_select(2, kv_of_head).transpose(1, 2);
  const at::Tensor scores = at::matmul(q_rows, k_heads) * c.softmax_scale + additive_mask(c, first, at::kDouble);
  const at::Tensor row_lse = at::logsumexp(scores, {-1}, true);
  const at::Tensor row_out = at::matmul(at::exp(scores - row_lse), v_heads).transpose(1, 2);
  (row_out * in.grad_out.to(at::kDouble).narrow(1, first, c.q_len - first)).sum().backward();
  out.narrow(1, first, c.q_len - first).copy_(row_out.detach());
  lse.narrow(2, first, c.q_len - first).copy_(row_lse.detach().squeeze(-1));
  return {out, lse, q.grad(), k.grad(), v.grad()};
}

// Torch's own attention on one process in the case's dtype: what a 16-bit result is measured against.
inline AttentionResult single_process_attention(const AttentionInputs& in, const AttentionCase& c, bool backward) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().clone().requires_grad_(true); };
  const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v);
  const auto mask = c.is_causal ? std::optional(additive_mask(c, 0, c.dtype)) : std::nullopt;
  const at::Tensor out =
      at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, 0.0, false,
                                       c.softmax_scale, /*enable_gqa=*/c.heads != c.kv_heads)
          .transpose(1, 2);
  if (!backward) return {out.detach(), {}, {}, {}, {}};
  (out * in.grad_out).sum().backward();
  return {out.detach(), {}, q.grad(), k.grad(), v.grad()};
}

inline double max_abs(const at::Tensor& x) {
  return x.numel() == 0 ? 0.0 : x.to(at::kDouble).abs().max().item<double>();
}
inline double max_error(const at::Tensor& a, const at::Tensor& b) {
  return max_abs(a.to(at::kDouble) - b.to(at::kDouble));
}

// float64: 1e-12 and float32: 1e-5, times max(1, max|ref|). 16-bit: twice the error of torch's own attention in that
// dtype plus one unit of the dtype's precision.
inline double tolerance(at::ScalarType dtype, const at::Tensor& ref, const at::Tensor& single) {
  if (dtype == at::kDouble) return 1e-12 * std::max(1.0, max_abs(ref));
  if (dtype == at::kFloat) return 1e-5 * std::max(1.0, max_abs(ref));
  const double eps = dtype == at::kHalf ? std::pow(2.0, -10) : std::pow(2.0, -7);
  return 2.0 * max_error(single, ref) + eps * max_abs(ref);
}

inline void expect_close(const char* what, const at::Tensor& actual, const at::Tensor& ref, double tol) {
  ASSERT_EQ(actual.sizes(), ref.sizes()) << what;
  const double error = max_error(actual, ref);
  EXPECT_TRUE(error <= tol) << what << ": error " << error << ", allowed " << tol;  // false for NaN too
}

// lse is float32 for 16-bit inputs too, but torch's CPU op computes it there with a coarser exponential (6.6e-5 seen at
// |lse| ~ 6): 1e-4, a tenth of float16's precision, of which a merge's weights are made.
inline void expect_lse_close(const at::Tensor& actual, const at::Tensor& ref, at::ScalarType dtype) {
  ASSERT_EQ(actual.sizes(), ref.sizes());
  EXPECT_EQ(actual.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
  EXPECT_TRUE(at::equal(actual.isneginf(), ref.isneginf())) << "lse is −inf on the wrong rows";
  const at::Tensor masked = ref.isneginf();
  const at::Tensor finite_ref = ref.masked_fill(masked, 0.0);
  const double tol = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 1e-4;
  expect_close("lse", actual.masked_fill(masked, 0.0), finite_ref, tol * std::max(1.0, max_abs(finite_ref)));
}

// Everything that a result must be: shapes, dtypes, values against float64.
inline void expect_result(const AttentionResult& actual, const AttentionInputs& in, const AttentionCase& c) {
  const bool backward = actual.dq.defined();
  const bool is_16_bit = c.dtype == at::kHalf || c.dtype == at::kBFloat16;
  const AttentionResult ref = reference_attention(in, c);
  const AttentionResult single = is_16_bit ? single_process_attention(in, c, backward) : AttentionResult{};
  EXPECT_EQ(actual.out.scalar_type(), c.dtype);
  expect_close("out", actual.out, ref.out, tolerance(c.dtype, ref.out, single.out));
  expect_lse_close(actual.lse, ref.lse, c.dtype);
  if (!backward) return;
  for (const at::Tensor& grad : {actual.dq, actual.dk, actual.dv}) EXPECT_EQ(grad.scalar_type(), c.dtype);
  expect_close("dq", actual.dq, ref.dq, tolerance(c.dtype, ref.dq, single.dq));
  expect_close("dk", actual.dk, ref.dk, tolerance(c.dtype, ref.dk, single.dk));
  expect_close("dv", actual.dv, ref.dv, tolerance(c.dtype, ref.dv, single.dv));
}

inline AttentionResult run_kernel(const kernels::Kernel& kernel, const AttentionInputs& in, const AttentionCase& c,
                                  bool backward) {
  const kernels::KernelOptions options{c.is_causal, c.softmax_scale};
  const auto [out, lse] = kernel.forward(in.q, in.k, in.v, options);
  if (!backward) return {out, lse, {}, {}, {}};
  const kernels::KernelGrads grads = kernel.backward(in.grad_out, {}, in.q, in.k, in.v, out, lse, options);
  return {out, lse, grads.dq, grads.dk, grads.dv};
}

inline void check_kernel(const kernels::Kernel& kernel, const AttentionCase& c, bool backward = true) {
  SCOPED_TRACE(describe(c));
  const AttentionInputs in = random_inputs(c);
  expect_result(run_kernel(kernel, in, c, backward), in, c);
}

inline const std::vector<at::ScalarType>& float_dtypes() {
  static const std::vector<at::ScalarType> dtypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
  return dtypes;
}

// The grid that every kernel must pass. float16 backward on CPU is slow: small sizes only.
inline void check_kernel_grid(const kernels::Kernel& kernel) {
  const std::vector<std::pair<int64_t, int64_t>> heads = {{8, 2}, {4, 1}, {3, 3}};
  for (const at::ScalarType dtype : float_dtypes()) {
    for (const auto& [h, h_kv] : heads) {
      for (const int64_t len : {1, 3, 7, 64, 257}) {
        for (const bool is_causal : {false, true}) {
          AttentionCase c;
          c.batch = len > 64 ? 1 : 2;
          c.q_len = c.kv_len = len;
          c.heads = h, c.kv_heads = h_kv;
          c.dtype = dtype, c.is_causal = is_causal;
          check_kernel(kernel, c, dtype != at::kHalf || len <= 64);
        }
      }
      for (const auto& [q_len, kv_len] : {std::pair<int64_t, int64_t>{7, 64}, {64, 3}, {1, 257}}) {
        AttentionCase c;
        c.q_len = q_len, c.kv_len = kv_len;
        c.heads = h, c.kv_heads = h_kv;
        c.dtype = dtype;
        check_kernel(kernel, c);
      }
    }
  }
}

// q = k = 0: every visible key weighs the same, so row i gives the mean of the values it sees and lse = ln(their
// count).
inline void check_uniform_probe(const kernels::Kernel& kernel, at::ScalarType dtype, bool is_causal) {
  const int64_t len = 9;
  AttentionCase c;
  c.q_len = c.kv_len = len, c.dtype = dtype, c.is_causal = is_causal;
  AttentionInputs in = random_inputs(c);
  in.q.zero_();
  in.k.zero_();
  const auto [out, lse] = kernel.forward(in.q, in.k, in.v, {is_causal, 1.0});
  const double eps = dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 2e-2;
  for (int64_t i = 0; i < len; ++i) {
    const int64_t count = is_causal ? i + 1 : len;
    const at::Tensor mean = in.v.to(at::kDouble).narrow(1, 0, count).mean(1);
    EXPECT_LE(max_error(out.select(1, i), mean), eps) << "row " << i;
    EXPECT_LE(max_abs(lse.select(2, i) - std::log(static_cast<double>(count))), std::max(eps, 1e-6)) << "row " << i;
  }
}

// The same tensor as a strided view [B, S, h, X] of a token-major buffer [S, B, h + 2, X].
inline at::Tensor token_major_view(const at::Tensor& x) {
  at::Tensor buffer = at::zeros({x.size(1), x.size(0), x.size(2) + 2, x.size(3)}, x.options());
  at::Tensor view = buffer.narrow(2, 1, x.size(2)).transpose(0, 1);
  view.copy_(x);
  return view;
}

}  // namespace ulysses::testing
