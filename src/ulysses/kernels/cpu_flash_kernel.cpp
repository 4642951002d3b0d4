#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "ulysses/base/text.h"
#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/cpu_flash/features.h"
#include "ulysses/kernels/merge_lse.h"
#include "ulysses/kernels/no_work.h"
#include "ulysses/kernels/run_tasks.h"

namespace ulysses::kernels {
namespace {

constexpr int64_t kHeadDimStep = 16;
constexpr int64_t kMaxHeadDim = 256;

std::string_view dtype_name(at::ScalarType dtype) {
  return dtype == at::kFloat ? "float32" : dtype == at::kHalf ? "float16" : "bfloat16";
}

// Any strides but one: the elements of a row lie side by side.
at::Tensor readable_rows(const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

// In the memory order of x, so that the exchange behind can send it as it lies; but the elements of a row side by side.
at::Tensor empty_rows_like(const at::Tensor& x) {
  const at::Tensor like = at::empty_like(x);
  return like.stride(3) == 1 ? like : at::empty(x.sizes(), x.options());
}

flash::Rows rows_of(const at::Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }
flash::MutableRows written_rows(const at::Tensor& x) {
  return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

flash::Shape shape_of(const at::Tensor& q, const at::Tensor& k, const KernelOptions& options) {
  return {q.size(0),
          q.size(1),
          k.size(1),
          q.size(2),
          k.size(2),
          q.size(3),
          options.softmax_scale,
          options.is_causal,
          options.causal_offset};
}

// Memory of one call; torch aligns it to 64 bytes.
at::Tensor words(int64_t count) { return at::empty({count}, at::TensorOptions().dtype(at::kInt)); }
uint32_t* begin_of(const at::Tensor& words) { return static_cast<uint32_t*>(words.mutable_data_ptr()); }

// Our own kernel: see cpu_flash/forward.h and backward.h. Forward and backward sum in float32; neither
// depends on the number of threads, bit for bit, and rows of out and dq do not on how queries and heads are split.
class CpuFlashKernel final : public Kernel {
 public:
  std::string_view name() const override { return "cpu_flash"; }

  std::optional<std::string> refusal(const KernelNeed& need) const override {
    if (need.device != "cpu") return base::cat("runs on device cpu, not ", need.device);
    if (need.dtype != "float32" && need.dtype != "bfloat16" && need.dtype != "float16")
      return base::cat("takes float32, bfloat16 or float16, not ", need.dtype);
    const flash::Features features = flash::features();
    if (flash::instance_for(features, need.dtype) == nullptr)
      return base::cat("needs ",
                       need.dtype == "bfloat16" ? "AVX-512 (F, DQ, BW, VL) and AVX512_BF16" : "AVX2 or AVX-512",
                       " for ", need.dtype, ", and this processor offers ", flash::describe(features));
    if (need.head_dim != need.v_head_dim)
      return base::cat("needs v_head_dim equal to head_dim=", need.head_dim, ", not ", need.v_head_dim);
    if (need.head_dim % kHeadDimStep != 0 || need.head_dim > kMaxHeadDim)
      return base::cat("needs a head_dim of 16, 32, 48, … 256, not ", need.head_dim);
    if (need.has_mask) return std::string("takes no mask; cpu_fused does");
    if (need.has_softcap) return std::string("computes no softcap; math does");
    return std::nullopt;
  }

  std::optional<std::string> auto_refusal(const KernelNeed& need) const override {
    if (flash::is_first_choice(flash::features(), need.dtype)) return std::nullopt;
    return base::cat("is not measured for ", need.dtype, " on this processor; it runs where it is named");
  }

  bool takes_causal_offset() const override { return true; }
  bool takes_grad_lse() const override { return true; }

  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return output_without_keys(q, v);
    const flash::Instance& instance = instance_of(q);
    const at::Tensor q_rows = readable_rows(q), k_rows = readable_rows(k), v_rows = readable_rows(v);
    const KernelOutput result{empty_rows_like(q),
                              at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))};
    flash::ForwardCall call{shape_of(q, k, options), rows_of(q_rows),          rows_of(k_rows),
                            rows_of(v_rows),         written_rows(result.out), result.lse.mutable_data_ptr<float>()};
    const flash::ForwardSizes sizes = instance.forward_sizes(call.shape);
    const at::Tensor packed_k = words(sizes.packed_k), packed_v = words(sizes.packed_v);
    call.packed_k = begin_of(packed_k), call.packed_v = begin_of(packed_v);
    run_tasks(sizes.pack_tasks, [&](int64_t begin, int64_t end) { instance.pack(call, begin, end); });
    run_tasks(sizes.tile_tasks, [&](int64_t begin, int64_t end) {
      const at::Tensor scratch = words(sizes.scratch);
      instance.attend(call, begin_of(scratch), begin, end);
    });
    return result;
  }

  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& grad_lse, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    if (has_no_work(q, k)) return zero_grads(q, k, v);
    const at::Tensor q_rows = readable_rows(q), k_rows = readable_rows(k), v_rows = readable_rows(v);
    const at::Tensor out_rows = readable_rows(out), grad_rows = readable_rows(grad_out);
    const at::Tensor lse_rows = lse_for_backward(lse.to(at::kFloat)).contiguous();
    const at::Tensor grad_lse_rows =
        grad_lse.defined() ? grad_of_seen_rows(grad_lse.to(at::kFloat), lse).contiguous() : at::Tensor();
    KernelGrads grads{empty_rows_like(q), empty_rows_like(k), empty_rows_like(v), {}, {}};
    flash::BackwardCall call{shape_of(q, k, options),
                             rows_of(q_rows),
                             rows_of(k_rows),
                             rows_of(v_rows),
                             rows_of(out_rows),
                             rows_of(grad_rows),
                             lse_rows.const_data_ptr<float>(),
                             grad_lse.defined() ? grad_lse_rows.const_data_ptr<float>() : nullptr,
                             written_rows(grads.dq),
                             written_rows(grads.dk),
                             written_rows(grads.dv)};
    run_backward(instance_of(q), call);
    return grads;
  }

 private:
  static const flash::Instance& instance_of(const at::Tensor& q) {
    const flash::Instance* instance = flash::instance_for(flash::features(), dtype_name(q.scalar_type()));
    TORCH_CHECK(instance != nullptr, "cpu_flash cannot run here; ask refusal() before forward()");
    return *instance;
  }

  static void run_backward(const flash::Instance& instance, flash::BackwardCall& call) {
    const flash::BackwardSizes sizes = instance.backward_sizes(call.shape);
    const at::Tensor packed_k = words(sizes.packed_k), packed_v = words(sizes.packed_v);
    const at::Tensor packed_k_columns = words(sizes.packed_k_columns);
    const at::Tensor row_dot = words(sizes.row_tasks), dq_sums = words(sizes.dq_sums);
    call.packed_k = begin_of(packed_k), call.packed_v = begin_of(packed_v);
    call.packed_k_columns = begin_of(packed_k_columns);
    call.row_dot = reinterpret_cast<float*>(begin_of(row_dot));
    call.dq_sums = reinterpret_cast<float*>(begin_of(dq_sums));
    run_tasks(sizes.pack_tasks, [&](int64_t begin, int64_t end) { instance.pack_backward(call, begin, end); });
    run_tasks(sizes.row_tasks, [&](int64_t begin, int64_t end) { instance.dot_rows(call, begin, end); });
    run_tasks(sizes.key_tasks, [&](int64_t begin, int64_t end) {
      const at::Tensor scratch = words(sizes.scratch);
      instance.attend_backward(call, begin_of(scratch), begin, end);
    });
    run_tasks(sizes.finish_tasks, [&](int64_t begin, int64_t end) { instance.finish_dq(call, begin, end); });
  }
};

}  // namespace

const Kernel& cpu_flash_kernel() {
  static const CpuFlashKernel kernel;
  return kernel;
}

}  // namespace ulysses::kernels
