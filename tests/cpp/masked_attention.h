#pragma once

#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/log.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>

#include <functional>

#include "reference_attention.h"
#include "ulysses/kernels/local_attention.h"

// Attention with masks, softcap, sinks and a gradient through lse: random inputs for each, and float64 autograd of the
// definition, in which hidden keys weigh nothing and a sink is a column with value 0.
namespace ulysses::testing {

inline constexpr double kNoScore = -std::numeric_limits<double>::infinity();

struct MaskedInputs {
  AttentionInputs tensors;
  at::Tensor mask;      // undefined: none
  at::Tensor sinks;     // undefined: none
  at::Tensor grad_lse;  // undefined: none
  double softcap = 0.0;
};

struct MaskedResult {
  AttentionResult plain;
  at::Tensor dmask, dsinks;  // undefined where there is nothing to give
};

// True where the case or a boolean mask hides a key: what broadcasts over [B, H, Sq, Skv].
inline at::Tensor hidden_keys(const MaskedInputs& in, const AttentionCase& c) {
  at::Tensor hidden = additive_mask(c, 0, at::kDouble).isneginf();
  if (in.mask.defined() && in.mask.scalar_type() == at::kBool) hidden = hidden.logical_or(in.mask.logical_not());
  return hidden;
}

inline MaskedResult reference_masked_attention(const MaskedInputs& in, const AttentionCase& c) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().to(at::kDouble).clone().requires_grad_(true); };
  const at::Tensor q = leaf(in.tensors.q), k = leaf(in.tensors.k), v = leaf(in.tensors.v);
  const bool has_bias = in.mask.defined() && in.mask.scalar_type() != at::kBool;
  const at::Tensor bias = has_bias ? leaf(in.mask) : at::Tensor();
  const at::Tensor sinks = in.sinks.defined() ? leaf(in.sinks) : at::Tensor();

  const at::Tensor kv_of_head = at::arange(c.heads, at::kLong).floor_divide(c.heads / c.kv_heads);
  const at::Tensor k_heads = k.index_select(2, kv_of_head).permute({0, 2, 3, 1});
  const at::Tensor v_heads = v.index_select(2, kv_of_head).transpose(1, 2);
  at::Tensor scores = at::matmul(q.transpose(1, 2), k_heads) * c.softmax_scale;
  if (in.softcap > 0.0) scores = in.softcap * at::tanh(scores / in.softcap);
  if (has_bias) scores = scores + bias;
  scores = scores.masked_fill(hidden_keys(in, c), kNoScore);
  if (sinks.defined()) {
    const at::Tensor column = sinks.view({1, c.heads, 1, 1}).expand({c.batch, c.heads, c.q_len, 1});
    scores = at::cat({scores, column}, 3);
  }
  const at::Tensor highest = scores.detach().amax({-1}, true);
  const at::Tensor nothing = highest.isneginf();
  const at::Tensor reference = highest.masked_fill(nothing, 0.0);
  const at::Tensor weights = at::exp(scores - reference);
  const at::Tensor total = weights.sum(at::IntArrayRef{-1}, true).masked_fill(nothing, 1.0);
  const at::Tensor out = at::matmul(weights.narrow(3, 0, c.kv_len) / total, v_heads).transpose(1, 2);
  const at::Tensor lse = (reference + at::log(total)).masked_fill(nothing, kNoScore).squeeze(-1);

  at::Tensor loss = (out * in.tensors.grad_out.to(at::kDouble)).sum();
  if (in.grad_lse.defined()) {
    const auto of_seen_rows = [&](const at::Tensor& x) { return x.to(at::kDouble).masked_fill(lse.isneginf(), 0.0); };
    loss = loss + (of_seen_rows(lse) * of_seen_rows(in.grad_lse)).sum();
  }
  loss.backward();
  return {{out.detach(), lse.detach(), q.grad(), k.grad(), v.grad()},
          has_bias ? bias.grad() : at::Tensor(),
          sinks.defined() ? sinks.grad() : at::Tensor()};
}

// Torch's own attention in the case's dtype with everything that hides or adds in one mask: the measure for 16 bits.
inline AttentionResult single_process_masked(const MaskedInputs& in, const AttentionCase& c) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().clone().requires_grad_(true); };
  const at::Tensor q = leaf(in.tensors.q), k = leaf(in.tensors.k), v = leaf(in.tensors.v);
  at::Tensor mask = at::zeros({c.batch, c.heads, c.q_len, c.kv_len}, at::kDouble);
  if (in.mask.defined() && in.mask.scalar_type() != at::kBool) mask = mask + in.mask;
  mask = mask.masked_fill(hidden_keys(in, c), kNoScore).to(c.dtype);
  const at::Tensor out = at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask,
                                                          0.0, false, c.softmax_scale, c.heads != c.kv_heads)
                             .transpose(1, 2);
  (out * in.tensors.grad_out).sum().backward();
  return {out.detach(), {}, q.grad(), k.grad(), v.grad()};
}

inline kernels::LocalAttentionOptions local_options_of(const MaskedInputs& in, const AttentionCase& c,
                                                       bool mask_needs_grad) {
  return {c.is_causal, c.softmax_scale, c.q_begin, c.kv_begin, in.mask, in.softcap, in.sinks, mask_needs_grad};
}

inline MaskedResult run_masked(const kernels::Kernel& kernel, const MaskedInputs& in, const AttentionCase& c,
                               bool mask_needs_grad = false) {
  const kernels::LocalAttentionOptions options = local_options_of(in, c, mask_needs_grad);
  const AttentionInputs& x = in.tensors;
  const auto [out, lse] = kernels::local_attention(kernel, x.q, x.k, x.v, options);
  const kernels::KernelGrads grads =
      kernels::local_attention_backward(kernel, x.grad_out, in.grad_lse, x.q, x.k, x.v, out, lse, options);
  return {{out, lse, grads.dq, grads.dk, grads.dv}, grads.dmask, grads.dsinks};
}

// 16 bits: as for plain attention where torch's own gives a measure, beside which one unit at 1 is always allowed. Else
// (softcap, sinks, gradients of lse and mask) sums are float32, and what is left is the rounding of the result and that
// of out, which enters each of the `summed` terms of a gradient with its own sign.
inline double masked_tolerance(at::ScalarType dtype, const at::Tensor& ref, const at::Tensor& single,
                               double summed = 1.0) {
  const bool is_16_bit = dtype == at::kHalf || dtype == at::kBFloat16;
  if (!is_16_bit) return tolerance(dtype, ref, {});
  const double eps = dtype == at::kHalf ? std::pow(2.0, -10) : std::pow(2.0, -7);
  if (single.defined()) return tolerance(dtype, ref, single) + eps;
  return 2.0 * eps * (std::sqrt(summed) + max_abs(ref));
}

inline void expect_zero_where(const char* what, const at::Tensor& x, const at::Tensor& rows) {
  EXPECT_EQ(max_abs(x.masked_select(rows.transpose(1, 2).unsqueeze(-1))), 0.0) << what << " of rows without keys";
}

// Everything that a masked result must be: shapes, dtypes, values against float64, exact zeros on rows without keys.
inline void expect_masked_result(const MaskedResult& actual, const MaskedInputs& in, const AttentionCase& c) {
  const bool is_16_bit = c.dtype == at::kHalf || c.dtype == at::kBFloat16;
  const bool is_plain = !in.sinks.defined() && !in.grad_lse.defined() && in.softcap == 0.0;
  const MaskedResult ref = reference_masked_attention(in, c);
  const AttentionResult single = is_16_bit && is_plain ? single_process_masked(in, c) : AttentionResult{};
  const auto expect = [&](const char* what, const at::Tensor& got, const at::Tensor& wanted, const at::Tensor& measure,
                          at::ScalarType dtype, double summed = 1.0) {
    EXPECT_EQ(got.scalar_type(), dtype) << what;
    expect_close(what, got, wanted, masked_tolerance(c.dtype, wanted, measure, summed));
  };
  const auto rows = static_cast<double>(c.batch * c.heads * c.q_len);
  expect("out", actual.plain.out, ref.plain.out, single.out, c.dtype);
  expect_lse_close(actual.plain.lse, ref.plain.lse, c.dtype);
  expect("dq", actual.plain.dq, ref.plain.dq, single.dq, c.dtype);
  expect("dk", actual.plain.dk, ref.plain.dk, single.dk, c.dtype);
  expect("dv", actual.plain.dv, ref.plain.dv, single.dv, c.dtype);
  expect_zero_where("out", actual.plain.out, ref.plain.lse.isneginf());
  expect_zero_where("dq", actual.plain.dq, ref.plain.lse.isneginf());
  if (actual.dmask.defined()) expect("dmask", actual.dmask, ref.dmask, {}, in.mask.scalar_type(), rows);
  if (in.sinks.defined()) expect("dsinks", actual.dsinks, ref.dsinks, {}, in.sinks.scalar_type(), rows);
}

// The same values in another place in memory.
inline at::Tensor transposed_in_memory(const at::Tensor& x) { return x.transpose(2, 3).contiguous().transpose(2, 3); }
inline at::Tensor every_second_in_memory(const at::Tensor& x) {
  at::Tensor wide = at::zeros({x.size(0), x.size(1) + 1, x.size(2) + 2, 2 * x.size(3)}, x.options());
  at::Tensor view = wide.narrow(1, 1, x.size(1)).narrow(2, 1, x.size(2)).slice(3, 1, std::nullopt, 2);
  view.copy_(x);
  return view;
}

// A kind of mask: which axes differ, and how it lies in memory.
struct MaskKind {
  const char* name;
  bool batch, head, query, key;
  at::Tensor (*in_memory)(const at::Tensor&) = nullptr;
  bool expanded = false;  // to all four sizes, by strides
};

inline const std::vector<MaskKind>& mask_kinds() {
  static const std::vector<MaskKind> kinds = {
      {"key", true, false, false, true},
      {"key of all batches", false, false, false, true},
      {"query", false, false, true, true},
      {"head", false, true, true, true},
      {"head of all queries", false, true, false, true},
      {"everything", true, true, true, true},
      {"transposed", true, true, true, true, transposed_in_memory},
      {"sliced", true, true, true, true, every_second_in_memory},
      {"expanded keys", true, false, false, true, nullptr, true},
      {"expanded queries", true, true, true, false, nullptr, true},
  };
  return kinds;
}

// Half of the keys hidden, the second batch's (or the last rows' or head's) all; or, additive, random numbers with some
// −inf. dtype: kBool or a floating-point type.
inline at::Tensor random_mask(const MaskKind& kind, const AttentionCase& c, at::ScalarType dtype, uint64_t seed = 9) {
  const auto size = [](bool differs, int64_t full) { return differs ? full : 1; };
  const std::vector<int64_t> sizes = {size(kind.batch, c.batch), size(kind.head, c.heads), size(kind.query, c.q_len),
                                      size(kind.key, c.kv_len)};
  const at::Tensor noise = random_tensor(sizes, at::kDouble, seed);
  at::Tensor visible = noise > 0.0;
  if (kind.batch && c.batch > 1) visible.select(0, c.batch - 1).zero_();
  if (kind.query) visible.select(2, c.q_len / 2).zero_();
  if (kind.head && c.heads > 1) visible.select(1, 1).narrow(1, 0, 1).zero_();
  at::Tensor mask = visible;
  if (dtype != at::kBool) mask = (noise * 2.0).masked_fill(visible.logical_not(), kNoScore).to(dtype);
  if (kind.in_memory != nullptr) mask = kind.in_memory(mask);
  return kind.expanded ? mask.expand({c.batch, c.heads, c.q_len, c.kv_len}) : mask;
}

}  // namespace ulysses::testing
