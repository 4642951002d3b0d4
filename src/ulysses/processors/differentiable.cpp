#include "ulysses/processors/differentiable.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "ulysses/base/error.h"

namespace ulysses::processors {
namespace {

using strategy::AttentionPlan;
using strategy::Qkv;
using strategy::Strategy;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What backward needs besides tensors, carried through the autograd context.
struct Movement : torch::CustomClassHolder {
  Movement(AttentionPlan movement_plan, const Strategy& movement_strategy, exchange::Group movement_group)
      : plan(std::move(movement_plan)), strategy(movement_strategy), group(std::move(movement_group)) {}
  AttentionPlan plan;
  const Strategy& strategy;
  exchange::Group group;
};
using MovementPtr = c10::intrusive_ptr<Movement>;

void store(AutogradContext* context, const MovementPtr& movement) {
  context->saved_data["movement"] = c10::IValue::make_capsule(movement);
}

MovementPtr load(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Movement>(context->saved_data["movement"].toCapsule());
}

// Autograd hands an undefined gradient to an output that nobody used; the collective needs zeros.
at::Tensor or_zeros(const at::Tensor& grad, const c10::IValue& sizes, const at::Tensor& like) {
  return grad.defined() ? grad : at::zeros(sizes.toIntVector(), like.options());
}

// Checkpointing without reentrance runs a forward again until the last saved tensor is there again. Ranks with and
// without work must stop behind the same collective, so every rank saves one in each: the dtype and device of `x`.
void save_a_tensor(AutogradContext* context, const at::Tensor& x) {
  context->save_for_backward({at::empty({0}, x.options().requires_grad(false))});
}

struct ExchangeFunction : torch::autograd::Function<ExchangeFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const MovementPtr& movement) {
    const auto& [plan, strategy, group] = std::tie(movement->plan, movement->strategy, movement->group);
    const Qkv shards{q, k, v};
    const strategy::Buffers buffers = strategy.exchange(plan, shards, group);
    const Qkv views = strategy.views(plan, buffers, shards);
    store(context, movement);
    context->saved_data["q"] = views.q.sizes().vec();
    context->saved_data["k"] = views.k.sizes().vec();
    context->saved_data["v"] = views.v.sizes().vec();
    save_a_tensor(context, q);
    return {views.q, views.k, views.v};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const MovementPtr movement = load(context);
    const at::Tensor like = context->get_saved_variables()[0];
    const Qkv local{or_zeros(grads[0], context->saved_data["q"], like),
                    or_zeros(grads[1], context->saved_data["k"], like),
                    or_zeros(grads[2], context->saved_data["v"], like)};
    const Qkv shards = movement->strategy.exchange_backward(movement->plan, local, movement->group);
    return {shards.q, shards.k, shards.v, {}};
  }
};

struct RestoreFunction : torch::autograd::Function<RestoreFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& out, const at::Tensor& lse,
                               const MovementPtr& movement) {
    const kernels::KernelOutput shards = movement->strategy.restore(movement->plan, {out, lse}, movement->group);
    store(context, movement);
    context->set_materialize_grads(false);
    context->saved_data["out"] = shards.out.sizes().vec();
    save_a_tensor(context, shards.out);
    if (!shards.lse.defined()) return {shards.out};
    context->saved_data["lse"] = shards.lse.sizes().vec();
    context->saved_data["like_lse"] = at::empty({0}, shards.lse.options());
    return {shards.out, shards.lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_second_derivative();
    const MovementPtr movement = load(context);
    auto& data = context->saved_data;
    kernels::KernelOutput grad{or_zeros(grads[0], data["out"], context->get_saved_variables()[0]), {}};
    if (movement->plan.return_lse) grad.lse = or_zeros(grads[1], data["lse"], data["like_lse"].toTensor());
    grad = restore_backward(movement->plan, movement->strategy, grad, movement->group);
    return {grad.out, grad.lse, {}};
  }
};

}  // namespace

kernels::KernelOutput restore_backward(const AttentionPlan& plan, const Strategy& strategy,
                                       const kernels::KernelOutput& grad, const exchange::Group& group) {
  kernels::KernelOutput local = strategy.restore_backward(plan, grad, group);
  if (local.lse.defined() && !local.lse.any().item<bool>()) local.lse = at::Tensor();
  return local;
}

Qkv differentiable_exchange(const AttentionPlan& plan, const Strategy& strategy, const Qkv& shards,
                            const exchange::Group& group) {
  const auto views =
      ExchangeFunction::apply(shards.q, shards.k, shards.v, c10::make_intrusive<Movement>(plan, strategy, group));
  return {views[0], views[1], views[2]};
}

AttentionResult differentiable_restore(const AttentionPlan& plan, const Strategy& strategy,
                                       const kernels::KernelOutput& local, const exchange::Group& group) {
  const at::Tensor lse = local.lse.defined() ? local.lse : at::empty({0}, local.out.options());
  const auto shards = RestoreFunction::apply(local.out, lse, c10::make_intrusive<Movement>(plan, strategy, group));
  return {shards[0], shards.size() > 1 ? shards[1] : at::Tensor()};
}

void refuse_forward_derivative(const Qkv& qkv) {
  // Level 0 is the only one that torch has.
  const auto is_dual = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
  };
  if (!is_dual(qkv.q) && !is_dual(qkv.k) && !is_dual(qkv.v)) return;
  base::raise_if_any({{"CP065", base::ErrorKind::kUnsupported,
                       "a forward-mode derivative was asked for (torch.func.jvp, forward_ad), and there is none", "",
                       "use reverse mode: backward() or autograd.grad()"}},
                     "ulysses_attention");
}

void refuse_second_derivative() {
  if (!at::GradMode::is_enabled()) return;
  throw base::Error({{"CP065", base::ErrorKind::kUnsupported,
                      "a second derivative was asked for (create_graph=True), and backward is not differentiable", "",
                      "call backward() or autograd.grad() with create_graph=False"}},
                    "ulysses_attention");
}

}  // namespace ulysses::processors
