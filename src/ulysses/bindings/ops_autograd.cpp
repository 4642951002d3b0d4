// The schemas, and what stands above the real kernels: autograd and autocast.
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ulysses/bindings/ops.h"
#include "ulysses/bindings/ops_call.h"
#include "ulysses/processors/attention_processor.h"
#include "ulysses/processors/differentiable.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::bindings {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The non-tensor arguments of a call, kept from forward to backward.
void store_call(AutogradContext* context, ULYSSES_CALL_PARAMETERS) {
  auto& data = context->saved_data;
  data["group_name"] = std::string(group_name);
  data["cp_size"] = cp_size;
  data["cp_rank"] = cp_rank;
  data["lengths"] = lengths;
  data["padded_lengths"] = padded_lengths;
  data["kv_lengths"] = kv_lengths;
  data["kv_padded_lengths"] = kv_padded_lengths;
  data["is_causal"] = is_causal;
  data["softmax_scale"] = softmax_scale ? c10::IValue(*softmax_scale) : c10::IValue();
  data["return_lse"] = return_lse;
  data["config"] = std::string(config);
}

std::vector<c10::SymInt> sizes_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return {q.sym_size(0), q.sym_size(1), q.sym_size(2), q.sym_size(3), k.sym_size(1), k.sym_size(2), v.sym_size(3)};
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static variable_list forward(AutogradContext* context, ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS,
                               int64_t requires_grad_mask) {
    static const auto op = find_op<AttentionForward>("ulysses::attention_forward");
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [out, lse, saved_q, saved_kv, saved_out, saved_lse, saved_lengths] =
        op.call(ULYSSES_INPUT_ARGUMENTS, ULYSSES_CALL_ARGUMENTS, requires_grad_mask);
    store_call(context, ULYSSES_CALL_ARGUMENTS);
    context->saved_data["requires_grad_mask"] = requires_grad_mask;
    context->saved_data["sizes"] = c10::SymIntArrayRef(sizes_of(q, k, v));
    // Ulysses reads none of its inputs again: keeping them would double what backward holds. It is told by the shape of
    // what it saves, not by its size: a rank without heads must not refuse, alone, an input changed before backward.
    const bool ulysses = saved_out.dim() == 4;
    const bool local = !ulysses && saved_kv.dim() == 1;  // a group of one, or replicated K/V
    const at::Tensor none = at::empty({0}, q.options().requires_grad(false));
    context->save_for_backward({ulysses ? none : q, local ? k : none, local ? v : none, ulysses ? none : out, saved_q,
                                saved_kv, saved_out, saved_lse, saved_lengths, attn_mask.value_or(at::Tensor()),
                                sinks.value_or(at::Tensor())});
    context->set_materialize_grads(false);
    if (!return_lse) context->mark_non_differentiable({lse});
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find_op<AttentionBackward>("ulysses::attention_backward");
    translate_errors([] { processors::refuse_second_derivative(); });
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto lengths = data["lengths"].toSymIntVector();
    const auto padded_lengths = data["padded_lengths"].toSymIntVector();
    const auto kv_lengths = data["kv_lengths"].toSymIntVector();
    const auto kv_padded_lengths = data["kv_padded_lengths"].toSymIntVector();
    const auto sizes = data["sizes"].toSymIntVector();
    const auto scale = data["softmax_scale"];
    const int64_t bits = data["requires_grad_mask"].toInt();
    const auto given = [](const at::Tensor& x) { return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt; };
    const at::Tensor grad_out =
        grads[0].defined() ? grads[0] : at::zeros_symint({sizes[0], sizes[1], sizes[2], sizes[6]}, saved[0].options());
    const auto [dq, dk, dv, dmask, dsinks] = op.call(
        grad_out, given(grads[1]), saved[0], saved[1], saved[2], given(saved[9]), given(saved[10]), saved[3], saved[4],
        saved[5], saved[6], saved[7], saved[8], sizes, data["group_name"].toStringRef(), data["cp_size"].toInt(),
        data["cp_rank"].toInt(), lengths, padded_lengths, kv_lengths, kv_padded_lengths, data["is_causal"].toBool(),
        scale.isNone() ? std::nullopt : std::optional<double>(scale.toDouble()), data["return_lse"].toBool(),
        data["config"].toStringRef(), bits);
    const auto asked = [bits](int64_t bit, const at::Tensor& grad) { return (bits & bit) != 0 ? grad : at::Tensor(); };
    return {dq,
            dk,
            dv,
            asked(contract::kGradMask, dmask),
            asked(contract::kGradSinks, dsinks),
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {}};
  }
};

std::tuple<at::Tensor, at::Tensor> attention_autograd(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS) {
  translate_errors([&] { processors::refuse_forward_derivative({q, k, v}); });
  const int64_t bits =
      processors::requires_grad_bits({q, k, v}, {attn_mask.value_or(at::Tensor()), sinks.value_or(at::Tensor())});
  if (bits == 0) {
    static const auto op = find_op<Attention>("ulysses::attention");
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(ULYSSES_INPUT_ARGUMENTS, ULYSSES_CALL_ARGUMENTS);
  }
  const auto outputs = AttentionFunction::apply(ULYSSES_INPUT_ARGUMENTS, ULYSSES_CALL_ARGUMENTS, bits);
  return {outputs[0], outputs[1]};
}

// As torch's own attention does: q, k and v are cast to the autocast dtype. The mask and the sinks stay: a kernel reads
// them in any.
template <c10::DeviceType device>
std::tuple<at::Tensor, at::Tensor> attention_autocast(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS) {
  static const auto op = find_op<Attention>("ulysses::attention");
  const c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto cast = [](const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  };
  return op.call(cast(q), cast(k), cast(v), attn_mask, sinks, ULYSSES_CALL_ARGUMENTS);
}

}  // namespace

TORCH_LIBRARY(ulysses, library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  library.def(kAttentionSchema, tags);
  library.def(kAttentionForwardSchema, tags);
  library.def(kAttentionBackwardSchema, tags);
  library.def(kGatherSequenceSchema, tags);
  library.def(kGatherSequenceBackwardSchema, tags);
  library.def(kMergeAttentionSchema, tags);
  library.def(kSumGradSchema, tags);
  library.def(kSumOverRanksSchema, tags);
}

TORCH_LIBRARY_IMPL(ulysses, Autograd, library) { library.impl("attention", attention_autograd); }
TORCH_LIBRARY_IMPL(ulysses, AutocastCPU, library) { library.impl("attention", attention_autocast<c10::kCPU>); }
TORCH_LIBRARY_IMPL(ulysses, AutocastCUDA, library) { library.impl("attention", attention_autocast<c10::kCUDA>); }

}  // namespace ulysses::bindings
