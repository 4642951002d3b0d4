#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
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

// Scaled scores [B, h_kv, g·Sq, Skv] with −inf where a key is hidden.
at::Tensor masked_scores(const at::Tensor& q_rows, const at::Tensor& k_heads, const Sizes& n,
                         const KernelOptions& options) {
  at::Tensor scores = at::matmul(q_rows, k_heads.transpose(-2, -1)).mul_(options.softmax_scale);
  if (options.is_causal) {
    const at::Tensor hidden = at::ones({n.q_len, n.kv_len}, scores.options().dtype(at::kBool)).triu_(1);
    scores.view({n.batch, n.kv_heads, n.g, n.q_len, n.kv_len})
        .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  }
  return scores;
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
    const at::Tensor out = at::matmul(probabilities, v.to(dtype).transpose(1, 2));
    return {unfold_groups(out, n).to(q.scalar_type()), lse.reshape({n.batch, n.kv_heads * n.g, n.q_len})};
  }

  // With P = exp(scale·q·kᵀ − lse): dv = Pᵀ·dout, dS = P ∘ (dout·vᵀ − rowsum(dout ∘ out)), dq = scale·dS·k,
  // dk = scale·dSᵀ·q. Folded rows make the sums over a group's query heads part of the products.
  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& out, const at::Tensor& lse, const KernelOptions& options) const override {
    if (has_no_work(q, k)) return zero_grads(q, k, v);
    const Sizes n = sizes_of(q, k);
    const at::ScalarType dtype = accumulate_dtype(q.scalar_type());
    const at::Tensor q_rows = fold_groups(q.to(dtype), n);
    const at::Tensor grad_rows = fold_groups(grad_out.to(dtype), n);
    const at::Tensor k_heads = k.to(dtype).transpose(1, 2);
    const at::Tensor v_heads = v.to(dtype).transpose(1, 2);
    const at::Tensor lse_rows = lse_for_backward(lse.to(dtype)).reshape({n.batch, n.kv_heads, n.g * n.q_len, 1});

    const at::Tensor probabilities = at::exp(masked_scores(q_rows, k_heads, n, options) - lse_rows);
    const at::Tensor row_dot = at::sum(grad_rows * fold_groups(out.to(dtype), n), {-1}, /*keepdim=*/true);
    const at::Tensor grad_scores =
        (at::matmul(grad_rows, v_heads.transpose(-2, -1)) - row_dot).mul_(probabilities).mul_(options.softmax_scale);

    const at::Tensor dq = unfold_groups(at::matmul(grad_scores, k_heads), n);
    const at::Tensor dk = at::matmul(grad_scores.transpose(-2, -1), q_rows).transpose(1, 2);
    const at::Tensor dv = at::matmul(probabilities.transpose(-2, -1), grad_rows).transpose(1, 2);
    return {dq.to(q.scalar_type()), dk.to(k.scalar_type()), dv.to(v.scalar_type())};
  }
};

}  // namespace

// The reference: any float dtype, device and pair of head dimensions. Holds the whole score matrix,
// B·h·Sq·Skv·4 bytes (8 for float64) and about three of them in backward: for small sizes, and for what no fused
// kernel accepts.
const Kernel& math_kernel() {
  static const MathKernel kernel;
  return kernel;
}

}  // namespace ulysses::kernels
