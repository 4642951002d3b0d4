#include "ulysses/processors/prepare.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/contract/fingerprint.h"
#include "ulysses/exchange/agreement.h"
#include "ulysses/kernels/environment.h"
#include "ulysses/kernels/kernel.h"
#include "ulysses/processors/executed.h"
#include "ulysses/processors/kernel_processor.h"
#include "ulysses/processors/registry.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::processors {
namespace {

using contract::AttentionSpec;
using exchange::Group;

std::vector<base::Problem> all_problems(const AttentionSpec& spec, const UlyssesAttentionProcessor& backend,
                                        bool backward) {
  std::vector<base::Problem> problems = contract::check_attention(spec);
  if (!problems.empty()) return problems;  // a backend's own refusals presume a legal call
  const bool beside = spec.joint_len > 0 || spec.kv_role == "replicated";
  if (beside && backend.overrides_exchange())
    return {{"CP050", base::ErrorKind::kUnsupported,
             "this backend moves q, k and v itself, and the call has tokens that every rank holds",
             "Their place in what attend() gets is the base class's",
             "joint=None and kv_role=\"sharded\", or a backend that leaves exchange() to the base class"}};
  return backend.refusals(spec, backward);
}

// Whether the current stream of a CUDA device records a graph; asked through the device's guard, so that this library
// needs nothing of CUDA at link time.
template <typename Guard>
bool is_capturing(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) return guard.isStreamCapturing(stream);
  return false;  // a torch that cannot tell: a comparison then fails inside the capture, with CUDA's own error
}

bool is_capturing(const at::Device& device) {
  if (!device.is_cuda()) return false;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return is_capturing(guard, guard.getStream(device));
}

base::Problem capture_problem() {
  return {"CP066", base::ErrorKind::kUnsupported,
          "a call whose options are new to this group under CUDA graph capture, where ranks cannot compare them", "",
          "make the same call once before the capture, with agreement=\"auto\" and, under the uneven policy, a layout"};
}

}  // namespace

AttentionSpec describe(const strategy::Qkv& qkv, const CallTensors& extras, const Group& group,
                       const contract::AttentionOptions& options, const UlyssesAttentionProcessor& backend,
                       int64_t requires_grad_mask) {
  AttentionSpec spec;
  static_cast<contract::AttentionOptions&>(spec) = options;
  if (!spec.kv_layout && spec.kv_role != "replicated") spec.kv_layout = spec.layout;
  spec.q = tensor_spec(qkv.q, (requires_grad_mask & contract::kGradQ) != 0);
  spec.k = tensor_spec(qkv.k, (requires_grad_mask & contract::kGradK) != 0);
  spec.v = tensor_spec(qkv.v, (requires_grad_mask & contract::kGradV) != 0);
  if (extras.attn_mask.defined())
    spec.attn_mask = tensor_spec(extras.attn_mask, (requires_grad_mask & contract::kGradMask) != 0);
  if (extras.sinks.defined()) spec.sinks = tensor_spec(extras.sinks, (requires_grad_mask & contract::kGradSinks) != 0);
  spec.cp_rank = group.rank();
  spec.cp_size = group.size();
  for (const kernels::Kernel* kernel : kernels::all_kernels()) spec.known_kernels.emplace_back(kernel->name());
  if (&backend == &kernel_processor()) {
    std::string requested = kernels::requested_kernel(spec.kernel);
    if (kernels::find_kernel(requested) != nullptr)
      spec.kernel = std::move(requested);  // compared across the ranks like a name that was passed
  }
  spec.known_backends = backend_names();
  spec.backend_supports = backend.supports();
  return spec;
}

strategy::AttentionPlan prepare(AttentionSpec& spec, const at::Tensor& attn_mask,
                                const UlyssesAttentionProcessor& backend, const Group& group, const at::Device& device,
                                int64_t requires_grad_mask) {
  const std::vector<base::Problem> problems = all_problems(spec, backend, requires_grad_mask != 0);
  const bool failed = !problems.empty();
  const auto mode = exchange::agreement_mode(spec.agreement).value_or(exchange::AgreementMode::kAuto);
  if (group.size() == 1 || (failed && mode == exchange::AgreementMode::kOff)) {
    base::raise_if_any(problems, spec.op, spec.cp_rank, spec.cp_size);
    note_executed(spec, requires_grad_mask);
    return strategy::make_plan(spec, {});
  }
  const bool exchange_lengths = !failed && strategy::exchanges_lengths(spec);
  const auto rows = [&spec](const contract::TensorSpec& tensor) {  // joint tokens are no rank's own
    return tensor.sizes.size() > 1 ? tensor.sizes[1] - spec.joint_len : -1;
  };
  std::optional<strategy::AttentionPlan> plan;
  if (!failed && (!exchange_lengths || spec.attn_mask)) plan = strategy::make_plan(spec, {});
  if (plan && spec.attn_mask) {  // an axis that is gathered has a layout: else CP028
    const strategy::Strategy& strategy = strategy::strategy_for(spec.strategy, *plan);
    spec.mask_is_gathered = strategy::mask_is_gathered(attn_mask, *plan, strategy, group);
  }
  exchange::AgreementRequest request;
  request.text = failed ? contract::failed_fingerprint(problems)
                        : contract::fingerprint_text(contract::fingerprint_fields(spec, requires_grad_mask));
  request.mode = mode;
  request.numbers = {rows(spec.q), rows(spec.k)};
  request.numbers_needed = exchange_lengths;
  request.failed = failed;
  request.capturing = is_capturing(device);
  const exchange::Agreement agreement = exchange::agree(group, request);
  if (agreement.impossible) throw base::Error({capture_problem()}, spec.op, spec.cp_rank, spec.cp_size);
  if (!agreement.texts.empty()) {
    base::raise_if_any(contract::compare_fingerprints(agreement.texts), spec.op, spec.cp_rank, spec.cp_size);
  }
  base::raise_if_any(problems, spec.op, spec.cp_rank, spec.cp_size);
  note_executed(spec, requires_grad_mask);
  return exchange_lengths ? strategy::make_plan(spec, agreement.numbers) : *std::move(plan);
}

}  // namespace ulysses::processors
