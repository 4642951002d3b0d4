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

bool needs_grad(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

// The rule under which ranks also tell each other how attend() ended. A built-in kernel can fail on one rank alone too:
// memory runs out there.
bool compares_attend(const contract::AttentionOptions& options, const Group& group) {
  return group.size() > 1 && exchange::agreement_mode(options.agreement) == exchange::AgreementMode::kAlways;
}

bool any_needs_grad(const Qkv& qkv) { return needs_grad(qkv.q) || needs_grad(qkv.k) || needs_grad(qkv.v); }

}  // namespace

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

AttentionTrace UlyssesAttentionProcessor::run(const Qkv& qkv, const Group& group,
                                              const contract::AttentionOptions& options, int64_t requires_grad_mask) {
  const contract::AttentionSpec spec = describe(qkv, group, options, *this, requires_grad_mask);
  const at::Device device = qkv.q.defined() ? qkv.q.device() : at::Device(at::kCPU);  // None: CP020, on every rank
  const AttentionPlan plan = prepare(spec, *this, group, device, requires_grad_mask);
  const Strategy& strategy = strategy::strategy_for(spec.strategy, plan);
  const LocalWork work = strategy.local_work(plan);

  const Exchanged exchanged = exchange(plan, strategy, qkv, group);
  if (overrides_exchange()) check_kv_content(plan, work, qkv, exchanged.views, group);
  const AttendCall call = attend_call(options, plan, work, requires_grad_mask != 0);
  const auto attend_here = [&] {
    return attend_runs(work, exchanged.views, call,
                       [this](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttendCall& run) {
                         return attend(q, k, v, run);
                       });
  };
  const KernelOutput local = compares_attend(options, group) ? attend_together(group, attend_here) : attend_here();
  const AttentionResult result = restore(plan, strategy, local, group);
  check_output(plan, qkv, result);
  return {result, plan, exchanged.buffers, local};
}

AttentionResult UlyssesAttentionProcessor::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const Group& group, const contract::AttentionOptions& options) {
  refuse_forward_derivative({q, k, v});
  const int64_t mask = (needs_grad(q) ? 1 : 0) | (needs_grad(k) ? 2 : 0) | (needs_grad(v) ? 4 : 0);
  return run({q, k, v}, group, options, mask).result;
}

}  // namespace ulysses::processors
