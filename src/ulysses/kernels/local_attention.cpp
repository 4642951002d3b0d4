#include "ulysses/kernels/local_attention.h"

#include <ATen/ops/zeros.h>

#include "ulysses/kernels/causal_blocks.h"
#include "ulysses/kernels/merge_lse.h"
#include "ulysses/kernels/no_work.h"

namespace ulysses::kernels {
namespace {

using partition::Range;

// Queries and keys of one call in global positions, and the blocks that they leave.
struct Plan {
  Range q, kv;
  std::vector<Block> blocks;

  bool is_one_call() const { return blocks.size() == 1 && blocks[0].q == q; }
};

Plan plan_of(const at::Tensor& q, const at::Tensor& k, const LocalAttentionOptions& options) {
  const Range q_range{options.q_begin, options.q_begin + q.size(1)};
  const Range kv_range{options.kv_begin, options.kv_begin + k.size(1)};
  if (has_no_work(q, k)) return {q_range, kv_range, {}};
  return {q_range, kv_range, causal_blocks(q_range, kv_range, options.is_causal)};
}

// The rows of x at the global positions `part`, where x starts at whole.begin. A view; x itself for the whole range.
at::Tensor rows(const at::Tensor& x, int64_t dim, const Range& part, const Range& whole) {
  return part == whole ? x : x.narrow(dim, part.begin - whole.begin, part.size());
}

KernelOutput run_block(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const Plan& plan, const Block& block, const LocalAttentionOptions& options) {
  return kernel.forward(rows(q, 1, block.q, plan.q), rows(k, 1, block.kv, plan.kv), rows(v, 1, block.kv, plan.kv),
                        {block.is_causal, options.softmax_scale});
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
// +inf and a zero into NaN. So the sign (or the zero) moves to q; dq takes the same factor back.
PositiveScale with_positive_scale(const at::Tensor& q, LocalAttentionOptions options) {
  if (options.softmax_scale > 0.0) return {q, options};
  const double factor = options.softmax_scale < 0.0 ? -1.0 : 0.0;
  options.softmax_scale = options.softmax_scale < 0.0 ? -options.softmax_scale : 1.0;
  return {q.mul(factor), options, factor};
}

KernelOutput run_forward(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const LocalAttentionOptions& options) {
  const Plan plan = plan_of(q, k, options);
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
    const KernelOutput merged = merge_lse(seen, partial);
    seen.out.copy_(merged.out);
    seen.lse.copy_(merged.lse);
  }
  return {total.out.to(q.scalar_type()), total.lse};
}

KernelGrads run_backward(const Kernel& kernel, const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                         const LocalAttentionOptions& options) {
  const Plan plan = plan_of(q, k, options);
  if (plan.blocks.empty()) return zero_grads(q, k, v);

  const auto run = [&](const Block& block) {
    return kernel.backward(rows(grad_out, 1, block.q, plan.q), rows(q, 1, block.q, plan.q),
                           rows(k, 1, block.kv, plan.kv), rows(v, 1, block.kv, plan.kv), rows(out, 1, block.q, plan.q),
                           rows(lse, 2, block.q, plan.q), {block.is_causal, options.softmax_scale});
  };
  if (plan.is_one_call() && plan.blocks[0].kv == plan.kv) return run(plan.blocks[0]);

  const at::ScalarType sum_dtype = accumulate_dtype(q.scalar_type());
  const at::ScalarType kv_dtype = shares_keys(plan.blocks) ? sum_dtype : k.scalar_type();
  const at::Tensor dq = at::zeros(q.sizes(), q.options().dtype(sum_dtype));
  const at::Tensor dk = at::zeros(k.sizes(), k.options().dtype(kv_dtype));
  const at::Tensor dv = at::zeros(v.sizes(), v.options().dtype(kv_dtype));
  for (const Block& block : plan.blocks) {
    const KernelGrads partial = run(block);
    rows(dq, 1, block.q, plan.q).add_(partial.dq);
    rows(dk, 1, block.kv, plan.kv).add_(partial.dk);
    rows(dv, 1, block.kv, plan.kv).add_(partial.dv);
  }
  return {dq.to(q.scalar_type()), dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

}  // namespace

KernelOutput local_attention(const Kernel& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const LocalAttentionOptions& options) {
  const PositiveScale positive = with_positive_scale(q, options);
  return run_forward(kernel, positive.q, k, v, positive.options);
}

KernelGrads local_attention_backward(const Kernel& kernel, const at::Tensor& grad_out, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                     const at::Tensor& lse, const LocalAttentionOptions& options) {
  const PositiveScale positive = with_positive_scale(q, options);
  KernelGrads grads = run_backward(kernel, grad_out, positive.q, k, v, out, lse, positive.options);
  if (positive.factor != 1.0) grads.dq = grads.dq.mul(positive.factor);
  return grads;
}

}  // namespace ulysses::kernels
