#include "ulysses/processors/attention_processor.h"

#include <ATen/core/grad_mode.h>

#include "ulysses/base/text.h"
#include "ulysses/exchange/agreement.h"
#include "ulysses/processors/attend_runs.h"
#include "ulysses/processors/attend_together.h"
#include "ulysses/processors/differentiable.h"
#include "ulysses/processors/prepare.h"
#include "ulysses/processors/required_checks.h"

namespace ulysses::processors {
namespace {

using exchange::Group;
using kernels::KernelOutput;
using strategy::AttentionPlan;
using strategy::LocalWork;
using strategy::Qkv;
using strategy::Strategy;

bool needs_grad(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad();
}

// The rule under which ranks also tell each other how attend() ended. A built-in kernel can fail on one rank alone too:
// memory runs out there.
bool compares_attend(const contract::AttentionOptions& options, const Group& group) {
  return group.size() > 1 && exchange::agreement_mode(options.agreement) == exchange::AgreementMode::kAlways;
}

bool any_needs_grad(const Qkv& qkv) { return needs_grad(qkv.q) || needs_grad(qkv.k) || needs_grad(qkv.v); }

bool any_needs_grad(const CallTensors& extras) { return needs_grad(extras.attn_mask) || needs_grad(extras.sinks); }

// A rank without work has a result that no mask and no sink went into. Its backward must run all the same, because the
// other ranks' is a collective.
void attach(KernelOutput& local, const CallTensors& extras) {
  for (const at::Tensor& x : {extras.attn_mask, extras.sinks})
    if (needs_grad(x)) local.out = local.out + x.flatten().narrow(0, 0, 0).sum().to(local.out.scalar_type());
}

}  // namespace

int64_t requires_grad_bits(const Qkv& qkv, const CallTensors& extras) {
  const auto bit = [](contract::RequiresGrad flag, const at::Tensor& x) {
    return needs_grad(x) ? static_cast<int64_t>(flag) : 0;
  };
  return bit(contract::kGradQ, qkv.q) | bit(contract::kGradK, qkv.k) | bit(contract::kGradV, qkv.v) |
         bit(contract::kGradMask, extras.attn_mask) | bit(contract::kGradSinks, extras.sinks);
}

std::vector<base::Problem> UlyssesAttentionProcessor::refusals(const contract::AttentionSpec& spec, bool) const {
  if (spec.kernel == "auto") return {};
  return {{"CP050", base::ErrorKind::kUnsupported,
           base::cat("kernel=", spec.kernel, " is set, and this backend attends by its own code"), "",
           "kernel=\"auto\", or backend_name=\"ulysses\""}};
}

Exchanged UlyssesAttentionProcessor::exchange(const AttentionPlan& plan, const Strategy& strategy, const Qkv& qkv,
                                              const Group& group) {
  if (any_needs_grad(qkv)) return {differentiable_exchange(plan, strategy, qkv, group), {}};
  const strategy::Buffers buffers = strategy.exchange(plan, qkv, group);
  return {strategy.views(plan, buffers, qkv), buffers};
}

AttentionResult UlyssesAttentionProcessor::restore(const AttentionPlan& plan, const Strategy& strategy,
                                                   const KernelOutput& local, const Group& group) {
  if (needs_grad(local.out)) return differentiable_restore(plan, strategy, local, group);
  const KernelOutput shards = strategy.restore(plan, local, group);
  return {shards.out, shards.lse};
}

AttentionTrace UlyssesAttentionProcessor::run(const Qkv& qkv, const CallTensors& extras, const Group& group,
                                              const contract::AttentionOptions& options, int64_t requires_grad_mask) {
  contract::AttentionSpec spec = describe(qkv, extras, group, options, *this, requires_grad_mask);
  const at::Device device = qkv.q.defined() ? qkv.q.device() : at::Device(at::kCPU);  // None: CP020, on every rank
  const AttentionPlan plan = prepare(spec, extras.attn_mask, *this, group, device, requires_grad_mask);
  const Strategy& strategy = strategy::strategy_for(spec.strategy, plan);
  LocalWork work = strategy.local_work(plan);
  strategy::LocalMask mask = strategy::local_mask(extras.attn_mask, plan, strategy, work, device, group);

  const Exchanged exchanged = exchange(plan, strategy, qkv, group);
  if (overrides_exchange()) check_kv_content(plan, work, qkv, exchanged.views, group);
  const AttendWork todo =
      attend_work(options, plan, std::move(work), std::move(mask), extras.sinks, requires_grad_mask != 0);
  const auto attend_here = [&] {
    return attend_runs(todo, exchanged.views,
                       [this](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttendCall& call) {
                         return attend(q, k, v, call);
                       });
  };
  KernelOutput local = compares_attend(options, group) ? attend_together(group, attend_here) : attend_here();
  local = strategy::hide_invalid_rows(local, plan, todo.work);
  if (any_needs_grad(extras)) attach(local, extras);
  const AttentionResult result = restore(plan, strategy, local, group);
  check_output(plan, qkv, result);
  return {result, plan, exchanged.buffers, local};
}

AttentionResult UlyssesAttentionProcessor::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const Group& group, const contract::AttentionOptions& options,
                                                   const CallTensors& extras) {
  refuse_forward_derivative({q, k, v});
  return run({q, k, v}, extras, group, options, requires_grad_bits({q, k, v}, extras)).result;
}

}  // namespace ulysses::processors
