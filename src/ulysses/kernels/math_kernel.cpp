#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>

#include <limits>

#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/merge_lse.h"
#include "ulysses/kernels/no_work.h"

namespace ulysses::kernels {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The sizes of one call; g query heads share a KV head.
struct Sizes {
  int64_t batch, q_len, kv_len, kv_heads, g;
};

Sizes sizes_of(const at::Tensor& q, const at::Tensor& k) {
  return {q.size(0), q.size(1), k.size(1), k.size(2), q.size(2) / k.size(2)};
}

// [B, Sq, h, X] → [B, h_kv, g·Sq, X]: the query heads of a group become rows of one matrix, so a KV head is read
// where it lies and never repeated.
at::Tensor fold_groups(const at::Tensor& x, const Sizes& n) {
  return x.transpose(1, 2).reshape({n.batch, n.kv_heads, n.g * n.q_len, x.size(3)});
}

// The way back, as a contiguous [B, Sq, h, X].
at::Tensor unfold_groups(const at::Tensor& x, const Sizes& n) {
  return x.reshape({n.batch, n.kv_heads * n.g, n.q_len, x.size(3)}).transpose(1, 2).contiguous();
}

// [B|1, h|1, Sq|1, Skv] → what broadcasts over [B, h_kv, g, Sq, Skv]; a view.
at::Tensor unfold_heads(const at::Tensor& x, const Sizes& n) {
  return x.size(1) == 1 ? x.unsqueeze(1) : x.unflatten(1, {n.kv_heads, n.g});
}

// Scaled scores [B, h_kv, g·Sq, Skv], capped, with −inf where a key is hidden. cap_slope, where asked for: the
// derivative of the cap, 1 − tanh².
at::Tensor masked_scores(const at::Tensor& q_rows, const at::Tensor& k_heads, const Sizes& n,
                         const KernelOptions& options, at::Tensor* cap_slope = nullptr) {
  at::Tensor scores = at::matmul(q_rows, k_heads.transpose(-2, -1)).mul_(options.softmax_scale);
  if (options.softcap > 0.0) {
    scores.div_(options.softcap).tanh_();
    if (cap_slope != nullptr) *cap_slope = 1.0 - scores.square();
    scores.mul_(options.softcap);
  }
  const auto by_query = [&] { return scores.view({n.batch, n.kv_heads, n.g, n.q_len, n.kv_len}); };
  if (options.attn_mask.defined()) {
    const at::Tensor mask = unfold_heads(options.attn_mask, n);
    if (mask.scalar_type() == at::kBool) {
      by_query().masked_fill_(mask.logical_not(), -kInf);
    } else {
      by_query().add_(mask);
    }
  }
  if (options.is_causal) {
    const at::Tensor hidden = at::ones({n.q_len, n.kv_len}, scores.options().dtype(at::kBool)).triu_(1);
    by_query().masked_fill_(hidden, -kInf);
  }
  return scores;
}

// The gradient of the masked scores, summed over the axes along which the mask repeats.
at::Tensor mask_grad(const at::Tensor& grad_scores, const at::Tensor& mask, const Sizes& n) {
  const at::Tensor by_head = grad_scores.view({n.batch, n.kv_heads * n.g, n.q_len, n.kv_len});
  return by_head.sum_to_size(mask.sizes()).clone();  // a sum over no axis is a view of scores that change yet
}

class MathKernel final : public Kernel {
 public:
  std::string_view name() const override { return "math"; }

  std::optional<std::string> refusal(const KernelNeed&) const override { return std::nullopt; }

  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return output_without_keys(q, v);
    const Sizes n = sizes_of(q, k);
    const at::ScalarType dtype = accumulate_dtype(q.scalar_type());
    const at::Tensor scores = masked_scores(fold_groups(q.to(dtype), n), k.to(dtype).transpose(1, 2), n, options);
    const at::Tensor lse = at::logsumexp(scores, {-1}, /*keepdim=*/true);
    const at::Tensor probabilities = at::exp(scores - lse_for_backward(lse));
    // Where every key of a row carries a huge bias, lse has no digit left for the number of keys.
    if (options.attn_mask.defined() && options.attn_mask.scalar_type() != at::kBool)
      probabilities.div_(probabilities.sum(-1, /*keepdim=*/true).masked_fill_(at::isneginf(lse), 1.0));
    const at::Tensor out = at::matmul(probabilities, v.to(dtype).transpose(1, 2));
    return {unfold_groups(out, n).to(q.scalar_type()), lse.reshape({n.batch, n.kv_heads * n.g, n.q_len})};
  }

  // With P = exp(scores − lse): dv = Pᵀ·dout, and the gradient of the masked scores is
  // dS = P ∘ (dout·vᵀ − rowsum(dout ∘ out) + dlse); dS' = scale · dS ∘ cap_slope gives dq = dS'·k, dk = dS'ᵀ·q.
  // Folded rows make the sums over a group's query heads part of the products.
  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& grad_lse, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return zero_grads(q, k, v);
    const Sizes n = sizes_of(q, k);
    const at::ScalarType dtype = accumulate_dtype(q.scalar_type());
    const at::Tensor q_rows = fold_groups(q.to(dtype), n);
    const at::Tensor grad_rows = fold_groups(grad_out.to(dtype), n);
    const at::Tensor k_heads = k.to(dtype).transpose(1, 2);
    const at::Tensor v_heads = v.to(dtype).transpose(1, 2);
    const std::vector<int64_t> rows = {n.batch, n.kv_heads, n.g * n.q_len, 1};
    const at::Tensor lse_rows = lse_for_backward(lse.to(dtype)).reshape(rows);

    at::Tensor cap_slope;
    const at::Tensor probabilities = at::exp(masked_scores(q_rows, k_heads, n, options, &cap_slope) - lse_rows);
    at::Tensor row_dot = at::sum(grad_rows * fold_groups(out.to(dtype), n), {-1}, /*keepdim=*/true);
    if (grad_lse.defined()) row_dot.sub_(grad_of_seen_rows(grad_lse.to(dtype), lse).reshape(rows));
    const at::Tensor grad_scores = (at::matmul(grad_rows, v_heads.transpose(-2, -1)) - row_dot).mul_(probabilities);

    KernelGrads grads;
    if (options.mask_needs_grad) grads.dmask = mask_grad(grad_scores, options.attn_mask, n);
    grad_scores.mul_(options.softmax_scale);
    if (cap_slope.defined()) grad_scores.mul_(cap_slope);
    grads.dq = unfold_groups(at::matmul(grad_scores, k_heads), n).to(q.scalar_type());
    grads.dk = at::matmul(grad_scores.transpose(-2, -1), q_rows).transpose(1, 2).to(k.scalar_type());
    grads.dv = at::matmul(probabilities.transpose(-2, -1), grad_rows).transpose(1, 2).to(v.scalar_type());
    return grads;
  }
};

}  // namespace

// The reference: any float dtype, device, pair of head dimensions, mask and softcap. Holds the whole score matrix,
// B·h·Sq·Skv·4 bytes (8 for float64) and about three of them in backward: for small sizes, and for what no fused
// kernel accepts.
const Kernel& math_kernel() {
  static const MathKernel kernel;
  return kernel;
}

}  // namespace ulysses::kernels
