#include "ulysses/kernels/local_attention.h"

#include <ATen/ops/zeros.h>

#include <limits>

#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/causal_blocks.h"
#include "ulysses/kernels/merge_lse.h"
#include "ulysses/kernels/no_work.h"
#include "ulysses/kernels/sinks.h"

namespace ulysses::kernels {
namespace {

using partition::Range;

// Queries and keys of one call in global positions, and the blocks that they leave.
struct Plan {
  Range q, kv;
  std::vector<Block> blocks;

  bool is_one_call() const { return blocks.size() == 1 && blocks[0].q == q; }
};

Plan plan_of(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const LocalAttentionOptions& options) {
  const Range q_range{options.q_begin, options.q_begin + q.size(1)};
  const Range kv_range{options.kv_begin, options.kv_begin + k.size(1)};
  if (has_no_work(q, k)) return {q_range, kv_range, {}};
  if (kernel.takes_causal_offset()) return {q_range, kv_range, {{q_range, kv_range, options.is_causal}}};
  return {q_range, kv_range, causal_blocks(q_range, kv_range, options.is_causal)};
}

// The rows of x at the global positions `part`, where x starts at whole.begin. A view; x itself for the whole range.
at::Tensor rows(const at::Tensor& x, int64_t dim, const Range& part, const Range& whole) {
  return part == whole ? x : x.narrow(dim, part.begin - whole.begin, part.size());
}

// The part of a mask, or of its gradient, that a block reads; an axis of size 1 holds for all rows. A view.
at::Tensor mask_rows(const at::Tensor& mask, const Plan& plan, const Block& block) {
  if (!mask.defined()) return mask;
  const at::Tensor of_queries = mask.size(2) == 1 ? mask : rows(mask, 2, block.q, plan.q);
  return mask.size(3) == 1 ? of_queries : rows(of_queries, 3, block.kv, plan.kv);
}

KernelOptions block_options(const Plan& plan, const Block& block, const LocalAttentionOptions& options) {
  return {block.is_causal, options.softmax_scale,   mask_rows(options.attn_mask, plan, block),
          options.softcap, options.mask_needs_grad, block.is_causal ? block.q.begin - block.kv.begin : 0};
}

KernelOutput run_block(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const Plan& plan, const Block& block, const LocalAttentionOptions& options) {
  return kernel.forward(rows(q, 1, block.q, plan.q), rows(k, 1, block.kv, plan.kv), rows(v, 1, block.kv, plan.kv),
                        block_options(plan, block, options));
}

// Whether any key lies in two blocks, so that its gradient is a sum.
bool shares_keys(const std::vector<Block>& blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    for (size_t j = i + 1; j < blocks.size(); ++j) {
      const Range &a = blocks[i].kv, &b = blocks[j].kv;
      if (a.begin < b.end && b.begin < a.end) return true;
    }
  }
  return false;
}

// q · factor with a positive scale in place of q with any.
struct PositiveScale {
  at::Tensor q;
  LocalAttentionOptions options;
  double factor = 1.0;
};

// Torch's fused ops mask causal scores with −inf before they multiply by the scale, which a negative scale turns into
// +inf and a zero into NaN. So the sign (or the zero) moves to q; dq takes the same factor back. A scale that is not
// normal in the kernel's float32 is zero.
PositiveScale with_positive_scale(const at::Tensor& q, LocalAttentionOptions options) {
  const bool is_wide = q.scalar_type() == at::kDouble;
  const double least = is_wide ? std::numeric_limits<double>::min() : double{std::numeric_limits<float>::min()};
  if (options.softmax_scale >= least) return {q, options};
  const double factor = options.softmax_scale <= -least ? -1.0 : 0.0;
  options.softmax_scale = factor < 0.0 ? -options.softmax_scale : 1.0;
  return {q.mul(factor), options, factor};
}

KernelOutput run_forward(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const LocalAttentionOptions& options) {
  const Plan plan = plan_of(kernel, q, k, options);
  if (plan.is_one_call()) {
    KernelOutput result = run_block(kernel, q, k, v, plan, plan.blocks[0], options);
    return {result.out, result.lse.contiguous()};
  }
  KernelOutput total = output_without_keys(q, v);
  if (plan.blocks.empty()) return total;

  total.out = total.out.to(accumulate_dtype(q.scalar_type()));
  for (const Block& block : plan.blocks) {
    const KernelOutput partial = run_block(kernel, q, k, v, plan, block, options);
    const KernelOutput seen{rows(total.out, 1, block.q, plan.q), rows(total.lse, 2, block.q, plan.q)};
    const KernelOutput merged =
        merge_attention({seen.out, partial.out.to(seen.out.scalar_type())}, {seen.lse, partial.lse});
    seen.out.copy_(merged.out);
    seen.lse.copy_(merged.lse);
  }
  return {total.out.to(q.scalar_type()), total.lse};
}

// Zeros to sum the mask's gradient in, where it is asked for.
at::Tensor mask_sum(const at::Tensor& q, const LocalAttentionOptions& options) {
  if (!options.mask_needs_grad) return {};
  return at::zeros(options.attn_mask.sizes(), q.options().dtype(accumulate_dtype(q.scalar_type())));
}

KernelGrads run_backward(const Kernel& kernel, const at::Tensor& grad_out, const at::Tensor& grad_lse,
                         const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                         const at::Tensor& lse, const LocalAttentionOptions& options) {
  const Plan plan = plan_of(kernel, q, k, options);
  if (plan.blocks.empty()) {
    KernelGrads grads = zero_grads(q, k, v);
    grads.dmask = mask_sum(q, options);
    return grads;
  }

  const auto run = [&](const Block& block) {
    return kernel.backward(
        rows(grad_out, 1, block.q, plan.q), grad_lse.defined() ? rows(grad_lse, 2, block.q, plan.q) : grad_lse,
        rows(q, 1, block.q, plan.q), rows(k, 1, block.kv, plan.kv), rows(v, 1, block.kv, plan.kv),
        rows(out, 1, block.q, plan.q), rows(lse, 2, block.q, plan.q), block_options(plan, block, options));
  };
  if (plan.is_one_call() && plan.blocks[0].kv == plan.kv) return run(plan.blocks[0]);

  const at::ScalarType sum_dtype = accumulate_dtype(q.scalar_type());
  const at::ScalarType kv_dtype = shares_keys(plan.blocks) ? sum_dtype : k.scalar_type();
  const at::Tensor dq = at::zeros(q.sizes(), q.options().dtype(sum_dtype));
  const at::Tensor dk = at::zeros(k.sizes(), k.options().dtype(kv_dtype));
  const at::Tensor dv = at::zeros(v.sizes(), v.options().dtype(kv_dtype));
  const at::Tensor dmask = mask_sum(q, options);
  for (const Block& block : plan.blocks) {
    const KernelGrads partial = run(block);
    rows(dq, 1, block.q, plan.q).add_(partial.dq);
    rows(dk, 1, block.kv, plan.kv).add_(partial.dk);
    rows(dv, 1, block.kv, plan.kv).add_(partial.dv);
    if (dmask.defined()) mask_rows(dmask, plan, block).add_(partial.dmask);
  }
  return {dq.to(q.scalar_type()), dk.to(k.scalar_type()), dv.to(v.scalar_type()), dmask, {}};
}

}  // namespace

KernelOutput local_attention(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const LocalAttentionOptions& options) {
  const PositiveScale positive = with_positive_scale(q, options);
  const KernelOutput seen = run_forward(kernel, positive.q, k, v, positive.options);
  return options.sinks.defined() ? add_sinks(seen, options.sinks) : seen;
}

KernelGrads local_attention_backward(const Kernel& kernel, const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                     const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& out, const at::Tensor& lse,
                                     const LocalAttentionOptions& options) {
  const bool asks_more = (grad_lse.defined() && !kernel.takes_grad_lse()) || options.mask_needs_grad;
  const Kernel& serving = asks_more ? math_kernel() : kernel;
  const PositiveScale positive = with_positive_scale(q, options);
  KernelGrads grads = run_backward(serving, grad_out, grad_lse, positive.q, k, v, out, lse, positive.options);
  if (positive.factor != 1.0) grads.dq = grads.dq.mul(positive.factor);
  if (grads.dmask.defined()) grads.dmask = grads.dmask.to(options.attn_mask.scalar_type());
  if (options.sinks.defined()) grads.dsinks = sinks_grad(grad_out, grad_lse, out, lse, options.sinks);
  return grads;
}

}  // namespace ulysses::kernels
