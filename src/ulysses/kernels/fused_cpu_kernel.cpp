#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ulysses/base/text.h"
#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/merge_lse.h"
#include "ulysses/kernels/no_work.h"

namespace ulysses::kernels {
namespace {

// From this many keys on, K and V are copied head-major once before the kernel.
constexpr int64_t kHeadMajorKvLen = 1024;

// [B, S, h, X] → [B, h, S, X] as the fused op can read it: a view, unless the op would misread its strides. It takes
// any batch and head stride, but a last stride other than 1 gives silent garbage, and rows that overlap or repeat
// (expanded tensors) reach its matrix products as an illegal leading dimension.
at::Tensor readable_heads(const at::Tensor& x) {
  const at::Tensor heads = x.transpose(1, 2);
  const bool unit_last_stride = heads.stride(3) == 1;
  const bool rows_apart = heads.size(2) == 1 || heads.stride(2) >= heads.size(3);
  return unit_last_stride && rows_apart ? heads : heads.contiguous();
}

// K or V for the fused op. The op reads them again for every block of queries, so from about a thousand keys on, one
// copy to head-major rows costs less than it saves; q is read once and stays a view. Same bits either way.
// Measured on token-major views against head-major copies (torch 2.13, 1 thread, forward, ms): S=256, 4 heads, D=64:
// float32 0.84 / 0.83, bfloat16 0.92 / 0.92; S=1024: 13.4 / 13.6 and 14.8 / 13.6; S=4096: 216 / 210 and 231 / 214;
// S=4608, 6 heads, D=128: 753 / 737 and 809 / 730. Backward, the copy included, S=4608, bfloat16: 989 / 958.
at::Tensor kv_heads(const at::Tensor& x) {
  const at::Tensor heads = readable_heads(x);
  return heads.size(2) >= kHeadMajorKvLen ? heads.contiguous() : heads;
}

constexpr double kInf = std::numeric_limits<double>::infinity();

// The mask as the fused op reads it: something to add, in a dtype that it reads right (q's, or float32; a float32 mask
// with float64 queries is silent garbage), in the mask's own shape. Axes that only repeat in memory are cut to size 1,
// so that an expanded mask is never written out; the op expands by strides.
at::Tensor additive_mask(at::Tensor mask, at::ScalarType q_dtype) {
  for (int64_t dim = 0; dim < mask.dim(); ++dim) {
    if (mask.size(dim) > 1 && mask.stride(dim) == 0) mask = mask.narrow(dim, 0, 1);
  }
  if (mask.scalar_type() == at::kBool)
    return at::zeros(mask.sizes(), mask.options().dtype(q_dtype)).masked_fill_(mask.logical_not(), -kInf);
  return mask.scalar_type() == q_dtype ? mask : mask.to(accumulate_dtype(q_dtype));
}

std::optional<at::Tensor> op_mask(const at::Tensor& q, const KernelOptions& options) {
  if (!options.attn_mask.defined()) return std::nullopt;
  return additive_mask(options.attn_mask, q.scalar_type());
}

// True for the rows that an additive mask, with the causal diagonal, leaves without a key: what broadcasts over lse
// [B, h, Sq].
at::Tensor rows_without_keys(const at::Tensor& mask, bool is_causal) {
  const at::Tensor hidden = at::isneginf(mask);
  // One value for all keys: a causal row has its own key at least, so it decides alone.
  if (!is_causal || mask.size(3) == 1) return hidden.all(3);
  // One row for all queries: row i has a key if one of the keys up to i is visible.
  if (mask.size(2) == 1) return hidden.to(at::kByte).cumprod(3, at::kByte).to(at::kBool).squeeze(2);
  return hidden.logical_not().tril().any(3).logical_not();
}

class FusedCpuKernel final : public Kernel {
 public:
  std::string_view name() const override { return "cpu_fused"; }

  // float16 backward is right but about ten times slower than float32 (694 against 73 ms at S=1024, 8 heads, D=64);
  // it is not refused, so that a model gets one kernel forward and backward and no whole score matrix.
  std::optional<std::string> refusal(const KernelNeed& need) const override {
    if (need.device != "cpu") return base::cat("runs on device cpu, not ", need.device);
    if (need.dtype != "float32" && need.dtype != "float64" && need.dtype != "bfloat16" && need.dtype != "float16") {
      return base::cat("takes float32, float64, bfloat16 or float16, not ", need.dtype);
    }
    if (need.head_dim != need.v_head_dim) {
      return base::cat("needs v_head_dim equal to head_dim=", need.head_dim, ", not ", need.v_head_dim);
    }
    if (need.has_softcap) return std::string("computes no softcap; math does");
    return std::nullopt;
  }

  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return output_without_keys(q, v);
    const std::optional<at::Tensor> mask = op_mask(q, options);
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        readable_heads(q), kv_heads(k), kv_heads(v), /*dropout_p=*/0.0, options.is_causal, mask, options.softmax_scale);
    // The op's lse of a row that sees no key is 0, which a merge would take for a sum over keys.
    if (mask) lse.masked_fill_(rows_without_keys(*mask, options.is_causal), -kInf);
    return {out.transpose(1, 2), lse};
  }

  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& /*grad_lse*/, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return zero_grads(q, k, v);
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        readable_heads(grad_out), readable_heads(q), kv_heads(k), kv_heads(v), readable_heads(out),
        lse_for_backward(lse), /*dropout_p=*/0.0, options.is_causal, op_mask(q, options), options.softmax_scale);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), {}, {}};
  }
};

}  // namespace

const Kernel& fused_cpu_kernel() {
  static const FusedCpuKernel kernel;
  return kernel;
}

}  // namespace ulysses::kernels
