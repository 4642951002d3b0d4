#include "ulysses/processors/kernel_processor.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "ulysses/base/text.h"
#include "ulysses/kernels/environment.h"
#include "ulysses/kernels/local_attention.h"
#include "ulysses/processors/differentiable.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::processors {
namespace {

using contract::AttentionSpec;
using kernels::Kernel;
using kernels::KernelNeed;
using strategy::Qkv;

KernelNeed need_of(const Qkv& qkv, const AttendCall& call, bool backward) {
  KernelNeed need;
  need.device = qkv.q.is_cuda() ? "cuda" : "cpu";
  need.dtype = dtype_name(qkv.q.scalar_type());
  need.head_dim = qkv.q.size(3);
  need.v_head_dim = qkv.v.size(3);
  need.num_q_per_kv = qkv.q.size(2) / qkv.k.size(2);
  need.is_causal = call.is_causal;
  need.has_mask = call.attn_mask.defined();
  need.has_softcap = call.softcap.has_value();
  need.backward = backward;
  return need;
}

// refusals() has already proved that there is one.
const Kernel& kernel_for(const Qkv& qkv, const AttendCall& call, bool backward) {
  std::string why;
  const Kernel* kernel = kernels::select_kernel(kernels::requested_kernel(call.kernel), need_of(qkv, call, backward),
                                                kernels::all_kernels(), &why);
  if (kernel == nullptr)
    throw base::Error({{"CP032", base::ErrorKind::kUnsupported, why, "", "kernel=\"math\""}}, "attend");
  return *kernel;
}

kernels::LocalAttentionOptions local_options(const Qkv& qkv, const AttendCall& call) {
  kernels::LocalAttentionOptions options;
  options.is_causal = call.is_causal;
  options.softmax_scale = call.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(qkv.q.size(3))));
  options.q_begin = call.q_positions.begin;
  options.kv_begin = call.kv_positions.begin;
  options.attn_mask = call.attn_mask;
  options.sinks = call.sinks;
  options.softcap = call.softcap.value_or(0.0);
  return options;
}

kernels::KernelOutput kernel_forward(const Qkv& qkv, const AttendCall& call, bool backward) {
  return kernels::local_attention(kernel_for(qkv, call, backward), qkv.q, qkv.k, qkv.v, local_options(qkv, call));
}

// A kernel as a differentiable function, for callers whose autograd runs through attend().
struct KernelFunction : torch::autograd::Function<KernelFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v,
                                                const std::optional<at::Tensor>& attn_mask,
                                                const std::optional<at::Tensor>& sinks, const AttendCall& call) {
    const kernels::KernelOutput output = kernel_forward({q, k, v}, call, /*backward=*/true);
    context->save_for_backward(
        {q, k, v, output.out, output.lse, attn_mask.value_or(at::Tensor()), sinks.value_or(at::Tensor())});
    context->set_materialize_grads(false);
    context->saved_data["mask_needs_grad"] = attn_mask && attn_mask->requires_grad();
    if (call.softcap) context->saved_data["softcap"] = *call.softcap;
    context->saved_data["is_causal"] = call.is_causal;
    context->saved_data["kernel"] = call.kernel;
    context->saved_data["q_begin"] = call.q_positions.begin;
    context->saved_data["kv_begin"] = call.kv_positions.begin;
    if (call.softmax_scale) context->saved_data["softmax_scale"] = *call.softmax_scale;
    return {output.out, output.lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    refuse_second_derivative();
    const auto saved = context->get_saved_variables();
    AttendCall call;
    call.is_causal = context->saved_data["is_causal"].toBool();
    call.kernel = context->saved_data["kernel"].toStringRef();
    call.q_positions.begin = context->saved_data["q_begin"].toInt();
    call.kv_positions.begin = context->saved_data["kv_begin"].toInt();
    if (context->saved_data.count("softmax_scale") != 0)
      call.softmax_scale = context->saved_data["softmax_scale"].toDouble();
    if (context->saved_data.count("softcap") != 0) call.softcap = context->saved_data["softcap"].toDouble();
    call.attn_mask = saved[5];
    call.sinks = saved[6];
    const at::Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(saved[3]);
    const kernels::KernelGrads result =
        kernel_backward({grad_out, grads[1]}, {saved[0], saved[1], saved[2]}, {saved[3], saved[4]}, call,
                        context->saved_data["mask_needs_grad"].toBool());
    return {result.dq, result.dk, result.dv, result.dmask, result.dsinks, {}};
  }
};

}  // namespace

std::vector<std::string> KernelProcessor::supports() const {
  return {"is_causal", "softmax_scale", "q_positions", "need_lse", "attn_mask", "sinks", "softcap"};
}

std::vector<base::Problem> KernelProcessor::refusals(const AttentionSpec& spec, bool backward) const {
  if (spec.policy.backend_name != "ulysses")
    return {{"CP001", base::ErrorKind::kInvalidArgument,
             base::cat("backend_name=", spec.policy.backend_name, " is not the built-in backend that this op runs"), "",
             "ulysses_attention(), which asks the registry, or backend_name=\"ulysses\""}};
  if (kernels::find_kernel(spec.kernel) == nullptr && spec.kernel != "auto") return {};  // CP031 has said so
  if (auto problems = kernels::environment_problems(); !problems.empty()) return problems;
  KernelNeed need;
  need.device = spec.q.device.substr(0, spec.q.device.find(':'));
  need.dtype = spec.q.dtype;
  need.head_dim = spec.q.sizes[3];
  need.v_head_dim = spec.v.sizes[3];
  need.num_q_per_kv = spec.q.sizes[2] / spec.k.sizes[2];
  need.is_causal = spec.is_causal;
  need.has_mask = spec.attn_mask.has_value() || !spec.joint_valid_lens.empty();
  need.has_softcap = spec.softcap.has_value();
  need.backward = backward;
  std::string why;
  if (kernels::select_kernel(spec.kernel, need, kernels::all_kernels(), &why) != nullptr) return {};
  const bool from_environment = spec.kernel != "auto" && spec.kernel == kernels::requested_kernel("auto");
  return {
      {"CP032", base::ErrorKind::kUnsupported,
       base::cat(from_environment ? "ULYSSES_KERNEL=" : "kernel=", spec.kernel, " cannot serve dtype=", need.dtype,
                 ", device=", need.device, ", head_dim=", need.head_dim, ", v_head_dim=", need.v_head_dim, ": ", why),
       "", "kernel=\"math\", which takes any float dtype and head size"}};
}

kernels::KernelOutput KernelProcessor::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                              const AttendCall& call) {
  const auto needs_grad = [](const at::Tensor& x) { return x.defined() && x.requires_grad(); };
  const bool differentiable = at::GradMode::is_enabled() && (needs_grad(q) || needs_grad(k) || needs_grad(v) ||
                                                             needs_grad(call.attn_mask) || needs_grad(call.sinks));
  if (!differentiable) return kernel_forward({q, k, v}, call, call.trains);
  const auto given = [](const at::Tensor& x) { return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt; };
  const auto outputs = KernelFunction::apply(q, k, v, given(call.attn_mask), given(call.sinks), call);
  return {outputs[0], outputs[1]};
}

KernelProcessor& kernel_processor() {
  static KernelProcessor processor;
  return processor;
}

kernels::KernelGrads kernel_backward(const kernels::KernelOutput& grad, const Qkv& qkv,
                                     const kernels::KernelOutput& output, const AttendCall& call,
                                     bool mask_needs_grad) {
  kernels::LocalAttentionOptions options = local_options(qkv, call);
  options.mask_needs_grad = mask_needs_grad;
  return kernels::local_attention_backward(kernel_for(qkv, call, /*backward=*/true), grad.out, grad.lse, qkv.q, qkv.k,
                                           qkv.v, output.out, output.lse, options);
}

}  // namespace ulysses::processors
