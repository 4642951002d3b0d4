// The attention ops on real tensors: everything below autograd and tracing.
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/library.h>

#include "ulysses/bindings/ops.h"
#include "ulysses/bindings/ops_call.h"
#include "ulysses/exchange/token_rows.h"
#include "ulysses/processors/attend_runs.h"
#include "ulysses/processors/differentiable.h"
#include "ulysses/processors/kernel_processor.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::bindings {
namespace {

using processors::AttentionTrace;
using processors::CallTensors;
using strategy::AttentionPlan;
using strategy::Qkv;
using strategy::Strategy;

at::Tensor or_empty(const at::Tensor& tensor, const at::TensorOptions& options) {
  return tensor.defined() ? tensor : at::empty({0}, options);
}

// Contiguous and alone in its storage: op outputs must alias neither inputs nor each other.
at::Tensor own(const at::Tensor& tensor) {
  const bool alone = tensor.is_contiguous() && tensor.storage().nbytes() == tensor.nbytes();
  return alone ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

at::Tensor lengths_tensor(const AttentionPlan& plan, const contract::AttentionOptions& options, const at::Tensor& q) {
  const bool exchanged = plan.cp_size > 1 && !options.policy.require_seq_divisible && !options.layout;
  if (!exchanged) return at::empty({0}, q.options().dtype(at::kLong).requires_grad(false));
  std::vector<int64_t> lengths = plan.lengths;
  lengths.insert(lengths.end(), plan.kv_lengths.begin(), plan.kv_lengths.end());
  return at::tensor(lengths, at::kLong);
}

AttentionForwardResult forward(const Qkv& qkv, const CallTensors& extras, const OpCall& call,
                               int64_t requires_grad_mask) {
  const exchange::Group group = exchange::Group::resolve(std::string(call.group_name));
  const contract::AttentionOptions options = call.options();
  const AttentionTrace trace = processors::kernel_processor().run(qkv, extras, group, options, requires_grad_mask);
  const Strategy& strategy = strategy::strategy_for(options.strategy, trace.plan);
  const auto plain = qkv.q.options().requires_grad(false);
  const at::Tensor saved_lse = own(trace.local.lse);
  const at::Tensor lse =
      call.return_lse ? trace.result.lse.clone(at::MemoryFormat::Contiguous) : at::empty({0}, saved_lse.options());
  return {own(trace.result.out),
          lse,
          or_empty(trace.buffers.q, plain),
          or_empty(trace.buffers.kv, plain),
          strategy.backward_needs().local_out ? own(trace.local.out.transpose(0, 1)) : at::empty({0}, plain),
          saved_lse,
          lengths_tensor(trace.plan, options, qkv.q)};
}

// The plan of the forward again, from what its ops saved.
AttentionPlan saved_plan(const contract::AttentionOptions& options, const OpCall& call, const CallTensors& extras,
                         const at::Tensor& saved_lengths, const std::vector<int64_t>& sizes) {
  contract::AttentionSpec spec;
  static_cast<contract::AttentionOptions&>(spec) = options;
  spec.cp_rank = call.cp_rank;
  spec.cp_size = call.cp_size;
  if (!spec.kv_layout && spec.kv_role != "replicated") spec.kv_layout = spec.layout;
  if (extras.attn_mask.defined()) spec.attn_mask = processors::tensor_spec(extras.attn_mask, false);
  spec.q.sizes = {sizes[0], sizes[1], sizes[2], sizes[3]};
  spec.k.sizes = {sizes[0], sizes[4], sizes[5], sizes[3]};
  spec.v.sizes = {sizes[0], sizes[4], sizes[5], sizes[6]};
  std::vector<std::vector<int64_t>> exchanged;
  const int64_t ranks = saved_lengths.numel() / 2;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto* lengths = saved_lengths.const_data_ptr<int64_t>();
    exchanged.push_back({lengths[rank], lengths[ranks + rank]});
  }
  return strategy::make_plan(spec, exchanged);
}

// Partial: this rank's heads, or this rank's queries.
at::Tensor grad_of_sinks(const at::Tensor& sinks, const at::Tensor& grad, const strategy::LocalWork& work) {
  at::Tensor whole = at::zeros_like(sinks, sinks.options().requires_grad(false));
  if (grad.defined()) whole.narrow(0, work.q_head_begin, grad.size(0)).copy_(grad);
  return whole;
}

struct Saved {
  Qkv shards;
  CallTensors extras;
  at::Tensor out;
  strategy::Buffers buffers;
  kernels::KernelOutput local;
  at::Tensor lengths;
};

// Zeros in place of a gradient that this rank's loss has no use for.
kernels::KernelOutput grads_to_send(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
                                    const AttentionPlan& plan) {
  if (!plan.return_lse || (grad_lse && grad_lse->defined())) return {grad_out, grad_lse.value_or(at::Tensor())};
  const auto dtype = exchange::accumulate_dtype(grad_out.scalar_type());
  return {grad_out, at::zeros({grad_out.size(0), grad_out.size(2), grad_out.size(1)}, grad_out.options().dtype(dtype))};
}

AttentionBackwardResult backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
                                 const Saved& saved, const std::vector<int64_t>& sizes, const OpCall& call,
                                 int64_t requires_grad_mask) {
  const exchange::Group group = exchange::Group::resolve(std::string(call.group_name));
  const contract::AttentionOptions options = call.options();
  const AttentionPlan plan = saved_plan(options, call, saved.extras, saved.lengths, sizes);
  const Strategy& strategy = strategy::strategy_for(options.strategy, plan);
  strategy::LocalWork work = strategy.local_work(plan);
  strategy::LocalMask mask =
      strategy::local_mask(saved.extras.attn_mask, plan, strategy, work, grad_out.device(), group);
  kernels::KernelOutput local = saved.local;
  local.out =
      strategy.backward_needs().local_out ? saved.local.out.transpose(0, 1) : strategy.local_rows(plan, saved.out);

  const kernels::KernelOutput grad =
      processors::restore_backward(plan, strategy, grads_to_send(grad_out, grad_lse, plan), group);
  const Qkv views = strategy.views(plan, saved.buffers, saved.shards);
  const processors::AttendWork todo =
      processors::attend_work(options, plan, std::move(work), std::move(mask), saved.extras.sinks, /*trains=*/true);
  const bool mask_needs_grad = (requires_grad_mask & contract::kGradMask) != 0;
  const processors::LocalGrads grads = processors::attend_runs_backward(todo, views, local, grad, mask_needs_grad);
  const Qkv shards = strategy.exchange_backward(plan, grads.views, group);
  const at::Tensor none = at::empty({0}, grad_out.options());
  const auto& [attn_mask, sinks] = saved.extras;
  return {own(shards.q), own(shards.k), own(shards.v),
          mask_needs_grad ? strategy::grad_of_mask(attn_mask, grads.dmask, todo.mask, todo.work) : none,
          sinks.defined() ? grad_of_sinks(sinks, grads.dsinks, todo.work) : at::empty({0}, grad_out.options())};
}

CallTensors extras_of(const std::optional<at::Tensor>& attn_mask, const std::optional<at::Tensor>& sinks) {
  return {attn_mask.value_or(at::Tensor()), sinks.value_or(at::Tensor())};
}

AttentionForwardResult attention_forward(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS,
                                         int64_t requires_grad_mask) {
  AttentionForwardResult result;
  translate_errors([&] {
    result = forward({q, k, v}, extras_of(attn_mask, sinks), {ULYSSES_CALL_ARGUMENTS}, requires_grad_mask);
  });
  return result;
}

std::tuple<at::Tensor, at::Tensor> attention(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS) {
  AttentionForwardResult result =
      attention_forward(ULYSSES_INPUT_ARGUMENTS, ULYSSES_CALL_ARGUMENTS, /*requires_grad_mask=*/0);
  return {std::get<0>(result), std::get<1>(result)};
}

AttentionBackwardResult attention_backward(const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse,
                                           ULYSSES_INPUT_PARAMETERS, const at::Tensor& out, const at::Tensor& saved_q,
                                           const at::Tensor& saved_kv, const at::Tensor& saved_out,
                                           const at::Tensor& saved_lse, const at::Tensor& saved_lengths,
                                           c10::SymIntArrayRef sizes, ULYSSES_CALL_PARAMETERS,
                                           int64_t requires_grad_mask) {
  AttentionBackwardResult result;
  translate_errors([&] {
    const Saved saved{{q, k, v},           extras_of(attn_mask, sinks), out,
                      {saved_q, saved_kv}, {saved_out, saved_lse},      saved_lengths};
    result = backward(grad_out, grad_lse, saved, C10_AS_INTARRAYREF_SLOW(sizes).vec(), {ULYSSES_CALL_ARGUMENTS},
                      requires_grad_mask);
  });
  return result;
}

void register_kernels(torch::Library& library) {
  library.impl("attention", attention);
  library.impl("attention_forward", attention_forward);
  library.impl("attention_backward", attention_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(ulysses, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(ulysses, CUDA, library) { register_kernels(library); }

}  // namespace ulysses::bindings
