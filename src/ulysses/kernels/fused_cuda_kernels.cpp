// Torch's fused CUDA ops behind the kernel interface. Written against the op schemas and not yet run on a GPU: nothing
// here counts as supported until tests/cuda has passed on one. The schemas are device-independent, so this file
// compiles with a CPU build of torch.
//
// Note [Causal only on squares]: the flash op aligns is_causal bottom-right when Sq ≠ Skv, the efficient op top-left.
// causal_blocks() cuts attention so that causal calls have Sq = Skv, where both mean the same.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ulysses/base/text.h"
#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/merge_lse.h"
#include "ulysses/kernels/no_work.h"

namespace ulysses::kernels {
namespace {

using base::cat;

constexpr std::string_view kUnproved = " (this kernel is unproved: it has not run on a GPU yet)";

// [B, S, h, X] → [B, h, S, X] with dense rows.
at::Tensor heads_of(const at::Tensor& x) {
  const at::Tensor heads = x.transpose(1, 2);
  return heads.stride(3) == 1 ? heads : heads.contiguous();
}

// The seeds that a dropout of 0 never reads.
at::Tensor no_seed(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::zeros(sizes, like.options().dtype(dtype));
}

std::optional<std::string> refuse_device(const KernelNeed& need) {
  if (need.device == "cuda") return std::nullopt;
  return cat("runs on device cuda, not ", need.device);
}

std::optional<std::string> refuse_mask_and_softcap(const KernelNeed& need) {
  if (need.has_mask) return cat("takes no attn_mask; math does", kUnproved);
  if (need.has_softcap) return cat("takes no softcap; math does", kUnproved);
  return std::nullopt;
}

std::optional<std::string> refuse_other_than_half(const KernelNeed& need) {
  if (need.dtype == "float16" || need.dtype == "bfloat16") return std::nullopt;
  return cat("takes float16 or bfloat16, not ", need.dtype, kUnproved);
}

std::optional<std::string> refuse_head_dim(const KernelNeed& need, int64_t multiple, int64_t largest) {
  if (need.head_dim != need.v_head_dim) {
    return cat("needs v_head_dim equal to head_dim=", need.head_dim, ", not ", need.v_head_dim, kUnproved);
  }
  if (need.head_dim % multiple != 0 || need.head_dim > largest) {
    return cat("needs a head_dim that is a multiple of ", multiple, " and at most ", largest, ", not ", need.head_dim,
               kUnproved);
  }
  return std::nullopt;
}

// GQA is native: the op maps query heads to KV heads itself.
class CudaFlashKernel final : public Kernel {
 public:
  std::string_view name() const override { return "cuda_flash"; }

  std::optional<std::string> refusal(const KernelNeed& need) const override {
    if (auto why = refuse_device(need)) return why;
    if (auto why = refuse_mask_and_softcap(need)) return why;
    if (auto why = refuse_other_than_half(need)) return why;
    return refuse_head_dim(need, 8, 256);
  }

  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return output_without_keys(q, v);
    const auto result =
        at::_scaled_dot_product_flash_attention(heads_of(q), heads_of(k), heads_of(v), /*dropout_p=*/0.0,
                                                options.is_causal, /*return_debug_mask=*/false, options.softmax_scale);
    return {std::get<0>(result).transpose(1, 2), std::get<1>(result)};
  }

  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& /*grad_lse*/, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return zero_grads(q, k, v);
    const at::Tensor no_lengths;
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_backward(
        heads_of(grad_out), heads_of(q), heads_of(k), heads_of(v), heads_of(out), lse_for_backward(lse).contiguous(),
        no_lengths, no_lengths, q.size(1), k.size(1), /*dropout_p=*/0.0, options.is_causal,
        no_seed(q, {2}, at::kUInt64), no_seed(q, {}, at::kUInt64), options.softmax_scale);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), {}, {}};
  }
};

// Whether GQA, D_v ≠ D or head dims over 128 work varies with the cuDNN version: refused, the other kernels have them.
class CudaCudnnKernel final : public Kernel {
 public:
  std::string_view name() const override { return "cuda_cudnn"; }

  std::optional<std::string> refusal(const KernelNeed& need) const override {
    if (auto why = refuse_device(need)) return why;
    if (auto why = refuse_mask_and_softcap(need)) return why;
    if (auto why = refuse_other_than_half(need)) return why;
    if (need.num_q_per_kv != 1) {
      return cat("needs as many KV heads as query heads, not ", need.num_q_per_kv, " query heads per KV head",
                 kUnproved);
    }
    return refuse_head_dim(need, 8, 128);
  }

  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return output_without_keys(q, v);
    const auto result = at::_scaled_dot_product_cudnn_attention(
        heads_of(q), heads_of(k), heads_of(v), /*attn_bias=*/{}, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
        options.is_causal, /*return_debug_mask=*/false, options.softmax_scale);
    return {std::get<0>(result).transpose(1, 2), std::get<1>(result).squeeze(-1)};  // cuDNN's lse is [B, h, Sq, 1]
  }

  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& /*grad_lse*/, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return zero_grads(q, k, v);
    const at::Tensor none;
    auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        heads_of(grad_out), heads_of(q), heads_of(k), heads_of(v), heads_of(out),
        lse_for_backward(lse).contiguous().unsqueeze(-1), no_seed(q, {}, at::kLong), no_seed(q, {}, at::kLong), none,
        none, none, q.size(1), k.size(1), /*dropout_p=*/0.0, options.is_causal, options.softmax_scale);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), {}, {}};
  }
};

// The one fused CUDA op that takes float32. It has no GQA: one call per query head of a group, query heads j, j + g,
// j + 2g, … against all KV heads, so K and V are read g times but never repeated in memory.
class CudaEfficientKernel final : public Kernel {
 public:
  std::string_view name() const override { return "cuda_efficient"; }

  std::optional<std::string> refusal(const KernelNeed& need) const override {
    if (auto why = refuse_device(need)) return why;
    if (auto why = refuse_mask_and_softcap(need)) return why;
    const bool is_float32 = need.dtype == "float32";
    if (!is_float32 && need.dtype != "float16" && need.dtype != "bfloat16") {
      return cat("takes float32, float16 or bfloat16, not ", need.dtype, kUnproved);
    }
    const int64_t multiple = is_float32 ? 4 : 8;
    if (need.head_dim % multiple != 0 || need.v_head_dim % multiple != 0) {
      return cat("needs head dims that are multiples of ", multiple, " in ", need.dtype, ", not ", need.head_dim,
                 " and ", need.v_head_dim, kUnproved);
    }
    return std::nullopt;
  }

  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return output_without_keys(q, v);
    const int64_t g = q.size(2) / k.size(2);
    if (g == 1) return forward_heads(q, k, v, options);
    KernelOutput result{at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options()),
                        at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))};
    for (int64_t j = 0; j < g; ++j) {
      const KernelOutput part = forward_heads(q.slice(2, j, std::nullopt, g), k, v, options);
      result.out.slice(2, j, std::nullopt, g).copy_(part.out);
      result.lse.slice(1, j, std::nullopt, g).copy_(part.lse);
    }
    return result;
  }

  // dK and dV are sums over the group's calls, in float32.
  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& /*grad_lse*/, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return zero_grads(q, k, v);
    const int64_t g = q.size(2) / k.size(2);
    if (g == 1) return backward_heads(grad_out, q, k, v, out, lse, options);
    const at::Tensor dq = at::empty(q.sizes(), q.options());
    const at::Tensor dk = at::zeros(k.sizes(), k.options().dtype(at::kFloat));
    const at::Tensor dv = at::zeros(v.sizes(), v.options().dtype(at::kFloat));
    for (int64_t j = 0; j < g; ++j) {
      const auto heads = [&](const at::Tensor& x) { return x.slice(2, j, std::nullopt, g); };
      const KernelGrads part =
          backward_heads(heads(grad_out), heads(q), k, v, heads(out), lse.slice(1, j, std::nullopt, g), options);
      heads(dq).copy_(part.dq);
      dk.add_(part.dk);
      dv.add_(part.dv);
    }
    return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type()), {}, {}};
  }

 private:
  // The op pads the last dimension of lse to a multiple of 32 and wants it back so, with +inf in the padding.
  static constexpr int64_t kLseAlignment = 32;

  static KernelOutput forward_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const KernelOptions& options) {
    const auto result = at::_scaled_dot_product_efficient_attention(
        heads_of(q), heads_of(k), heads_of(v), /*attn_bias=*/{}, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
        options.is_causal, options.softmax_scale);
    return {std::get<0>(result).transpose(1, 2), std::get<1>(result).narrow(2, 0, q.size(1))};
  }

  static KernelGrads backward_heads(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                                    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                    const KernelOptions& options) {
    const int64_t padding = (kLseAlignment - q.size(1) % kLseAlignment) % kLseAlignment;
    const at::Tensor padded_lse =
        at::constant_pad_nd(lse_for_backward(lse).contiguous(), {0, padding}, std::numeric_limits<double>::infinity());
    auto [dq, dk, dv, no_bias_grad] = at::_scaled_dot_product_efficient_attention_backward(
        heads_of(grad_out), heads_of(q), heads_of(k), heads_of(v), /*attn_bias=*/at::Tensor(), heads_of(out),
        padded_lse, no_seed(q, {}, at::kLong), no_seed(q, {}, at::kLong), /*dropout_p=*/0.0,
        /*grad_input_mask=*/{true, true, true, false}, options.is_causal, options.softmax_scale);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), {}, {}};
  }
};

}  // namespace

const Kernel& cuda_flash_kernel() {
  static const CudaFlashKernel kernel;
  return kernel;
}

const Kernel& cuda_cudnn_kernel() {
  static const CudaCudnnKernel kernel;
  return kernel;
}

const Kernel& cuda_efficient_kernel() {
  static const CudaEfficientKernel kernel;
  return kernel;
}

}  // namespace ulysses::kernels
