#include "ulysses/doctor/oracle.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

namespace ulysses::doctor {

at::Tensor oracle_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                            double softmax_scale) {
  const int64_t num_q_per_kv = q.size(2) / k.size(2);
  // The oracle may repeat K and V: it is small, and obviously right.
  const at::Tensor keys = k.to(at::kDouble).repeat_interleave(num_q_per_kv, 2);
  const at::Tensor values = v.to(at::kDouble).repeat_interleave(num_q_per_kv, 2);
  at::Tensor scores = at::einsum("bihd,bjhd->bhij", {q.to(at::kDouble), keys}) * softmax_scale;
  if (is_causal) {
    const at::Tensor hidden = at::arange(k.size(1)).unsqueeze(0) > at::arange(q.size(1)).unsqueeze(1);
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  return at::einsum("bhij,bjhd->bihd", {scores.softmax(-1), values});
}

OracleGrads oracle_gradients(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             bool is_causal, double softmax_scale) {
  const at::AutoGradMode enabled(true);
  const auto leaf = [](const at::Tensor& tensor) { return tensor.detach().to(at::kDouble).requires_grad_(true); };
  const at::Tensor q64 = leaf(q);
  const at::Tensor k64 = leaf(k);
  const at::Tensor v64 = leaf(v);
  const at::Tensor out = oracle_attention(q64, k64, v64, is_causal, softmax_scale);
  const auto grads = torch::autograd::grad({out}, {q64, k64, v64}, {grad_out.to(at::kDouble)});
  return {out.detach(), grads[0], grads[1], grads[2]};
}

at::Tensor local_only_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t cp_size,
                                double softmax_scale) {
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < cp_size; ++rank) {
    const auto shard = [&](const at::Tensor& tensor) { return tensor.chunk(cp_size, 1)[static_cast<size_t>(rank)]; };
    parts.push_back(oracle_attention(shard(q), shard(k), shard(v), /*is_causal=*/false, softmax_scale));
  }
  return at::cat(parts, 1);
}

}  // namespace ulysses::doctor
