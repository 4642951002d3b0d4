#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ulysses::kernels {

// What a local attention call needs from a kernel, free of data: the choice of a kernel is a pure function of this.
struct KernelNeed {
  std::string device = "cpu";  // "cpu" or "cuda"
  std::string dtype = "float32";
  int64_t head_dim = 0;
  int64_t v_head_dim = 0;
  int64_t num_q_per_kv = 1;
  bool is_causal = false;
  bool backward = false;
  bool has_mask = false;
  bool has_softcap = false;
};

struct KernelOptions {
  bool is_causal = false;      // row i sees keys ≤ i + causal_offset
  double softmax_scale = 1.0;  // positive, and normal in float32
  // [B|1, h|1, Sq|1, Skv], any strides: bool, true where the key may be seen, or floating-point, added to the scaled
  // scores. Undefined: every key may be seen. With is_causal a key must pass both.
  at::Tensor attn_mask;
  double softcap = 0.0;  // > 0: softcap · tanh(scores / softcap) in place of the scaled scores, before the mask
  bool mask_needs_grad = false;  // backward returns dmask; for a floating-point mask
  int64_t causal_offset = 0;     // 0, and Sq = Skv where is_causal, unless the kernel takes_causal_offset()
};

struct KernelOutput {
  at::Tensor out;  // [B, Sq, h, D_v]
  at::Tensor lse;  // [B, h, Sq], natural log, float32 (float64 for float64 inputs)
};

struct KernelGrads {
  at::Tensor dq, dk, dv;  // like q, k, v
  at::Tensor dmask;       // the mask's shape, undefined unless mask_needs_grad
  at::Tensor dsinks;      // [h], from local_attention_backward with sinks, else undefined
};

// A local attention kernel over whole, non-empty heads. A row that sees no key: out 0, lse −inf, zero gradients.
// Shapes:  q [B, Sq, h, D], k [B, Skv, h_kv, D], v [B, Skv, h_kv, D_v], any strides; h % h_kv == 0, GQA native.
// Comm:    none.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual std::string_view name() const = 0;
  // Why this kernel cannot serve the need, with what it accepts; nullopt if it can.
  virtual std::optional<std::string> refusal(const KernelNeed& need) const = 0;
  // Why "auto" leaves a call that this kernel can serve to the next.
  virtual std::optional<std::string> auto_refusal(const KernelNeed&) const { return std::nullopt; }
  // Whether a causal call may have queries and keys at any two positions, so that it need not be cut into blocks.
  virtual bool takes_causal_offset() const { return false; }
  // Whether backward takes a gradient of lse.
  virtual bool takes_grad_lse() const { return false; }
  virtual KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const KernelOptions& options) const = 0;
  // With the *global* out and lse the result over one block of keys is that block's additive part.
  // grad_lse [B, h, Sq] is undefined (none) unless the kernel takes_grad_lse(), and mask_needs_grad reaches the math
  // kernel only: no fused op of torch offers them, and local_attention_backward() sends such calls there. dmask comes
  // back in the accumulate_dtype of q.
  virtual KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& grad_lse, const at::Tensor& q,
                               const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                               const KernelOptions& options) const = 0;
};

// All kernels, in the order in which "auto" tries them.
std::span<const Kernel* const> all_kernels();
const Kernel* find_kernel(std::string_view name);  // nullptr if unknown

// "auto" or a name → the kernel, or nullptr with the reasons in `why`.
const Kernel* select_kernel(std::string_view name, const KernelNeed& need, std::span<const Kernel* const> kernels,
                            std::string* why);

}  // namespace ulysses::kernels
