// Shapes of the attention ops for tracing: symbolic sizes in, symbolic sizes out, no group needed.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/SymIntArrayRef.h>
#include <torch/library.h>

#include "ulysses/base/error.h"
#include "ulysses/bindings/ops.h"
#include "ulysses/bindings/ops_call.h"
#include "ulysses/contract/options_text.h"
#include "ulysses/partition/head_ranges.h"
#include "ulysses/partition/sequence_layout.h"
#include "ulysses/processors/attention_processor.h"

namespace ulysses::bindings {
namespace {

using c10::SymInt;

at::Tensor empty(std::vector<SymInt> sizes, const at::TensorOptions& options) {
  return at::empty_symint(sizes, options.requires_grad(false));
}

at::Tensor nothing(const at::TensorOptions& options) { return at::empty({0}, options.requires_grad(false)); }

SymInt sum(c10::SymIntArrayRef values) {
  SymInt total = 0;
  for (const SymInt& value : values) total = total + value;
  return total;
}

// Tokens of one tensor's sequence: own, and of all ranks.
struct Tokens {
  SymInt local, global;
};

Tokens tokens_of(const at::Tensor& tensor, c10::SymIntArrayRef lengths, const OpCall& call, int64_t joint_len) {
  if (!lengths.empty()) return {lengths[static_cast<size_t>(call.cp_rank)], sum(lengths)};
  const SymInt rows = tensor.sym_size(1) - joint_len;
  return {rows, rows * call.cp_size};
}

bool split_layouts(const at::Tensor& q, const at::Tensor& k, const OpCall& call) {
  if (call.lengths.size() != call.kv_lengths.size()) return true;
  for (size_t rank = 0; rank < call.lengths.size(); ++rank)
    if (call.lengths[rank] != call.kv_lengths[rank]) return true;
  return call.lengths.empty() && q.sym_size(1) != k.sym_size(1);
}

void refuse_unknown_lengths(const contract::UlyssesContextParallelPolicy& policy, const OpCall& call) {
  if (policy.require_seq_divisible || !call.lengths.empty() || call.cp_size == 1) return;
  // Not of kind kUnsupported: tracing takes a NotImplementedError for an op without shapes and hides the text.
  throw base::Error(
      {{"CP064", base::ErrorKind::kInvalidArgument,
        "require_seq_divisible=False without a layout exchanges lengths on every call, and a traced graph "
        "needs them beforehand",
        "", "pass layout=SequenceLayout(seq_len, cp_size, policy), or call without torch.compile"}},
      "ulysses_attention", call.cp_rank, call.cp_size);
}

AttentionForwardResult forward_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, OpCall call) {
  const contract::AttentionOptions options = contract::options_from_text(call.config);
  const int64_t joint = options.joint_len;
  refuse_unknown_lengths(options.policy, call);
  if (call.kv_lengths.empty()) call.kv_lengths = call.lengths;
  const auto self = static_cast<size_t>(call.cp_rank);
  const SymInt batch = q.sym_size(0);
  const SymInt d = q.sym_size(3);
  const SymInt d_v = v.sym_size(3);
  const int64_t num_heads = q.sym_size(2).guard_int(__FILE__, __LINE__);
  const int64_t num_kv_heads = k.sym_size(2).guard_int(__FILE__, __LINE__);
  const Tokens q_tokens = tokens_of(q, call.lengths, call, joint);
  const Tokens kv_tokens = tokens_of(k, call.kv_lengths, call, joint);

  const auto plain = q.options();
  const auto lse_options = plain.dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor out = empty({batch, q.sym_size(1), num_heads, d_v}, plain);
  const at::Tensor lse = call.return_lse ? empty({batch, num_heads, q.sym_size(1)}, lse_options) : nothing(lse_options);
  const at::Tensor no_lengths = nothing(plain.dtype(at::kLong));

  const bool is_local = call.cp_size == 1 || options.kv_role == "replicated";
  if (is_local || options.strategy == "allgather_kv") {
    const at::Tensor saved_kv =
        is_local ? nothing(plain) : empty({joint + kv_tokens.global, batch, num_kv_heads * (d + d_v)}, plain);
    const int64_t joint_queries = is_local ? joint : partition::balanced_lengths(joint, call.cp_size)[self];
    return {out,
            lse,
            nothing(plain),
            saved_kv,
            nothing(plain),
            empty({batch, num_heads, joint_queries + q_tokens.local}, lse_options),
            no_lengths};
  }
  const partition::HeadRanges heads = partition::head_ranges(num_heads, num_kv_heads, call.cp_size);
  const int64_t h = heads.query[self].size();
  const int64_t h_kv = heads.kv[self].size();
  const bool split = split_layouts(q, k, call);
  const SymInt kv_row = h_kv * (d + d_v);
  const SymInt q_row = split ? h * d : h * d + kv_row;
  return {out,
          lse,
          empty({joint + q_tokens.global, batch, q_row}, plain),
          split ? empty({joint + kv_tokens.global, batch, kv_row}, plain) : nothing(plain),
          empty({joint + q_tokens.global, batch, h, d_v}, plain),
          empty({batch, h, joint + q_tokens.global}, lse_options),
          no_lengths};
}

// One meta tensor among real ones brings a real call here, where no rule is checked.
bool is_real_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return !q.is_meta() || !k.is_meta() || !v.is_meta();
}

AttentionForwardResult attention_forward_meta(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS,
                                              int64_t requires_grad_mask) {
  if (is_real_call(q, k, v)) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("ulysses::attention_forward", "").typed<AttentionForward>();
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), ULYSSES_INPUT_ARGUMENTS, ULYSSES_CALL_ARGUMENTS,
                         requires_grad_mask);
  }
  AttentionForwardResult result;
  translate_errors([&] { result = forward_shapes(q, k, v, {ULYSSES_CALL_ARGUMENTS}); });
  return result;
}

std::tuple<at::Tensor, at::Tensor> attention_meta(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS) {
  const AttentionForwardResult result = attention_forward_meta(ULYSSES_INPUT_ARGUMENTS, ULYSSES_CALL_ARGUMENTS, 0);
  return {std::get<0>(result), std::get<1>(result)};
}

AttentionBackwardResult attention_backward_meta(const at::Tensor& grad_out, const std::optional<at::Tensor>&,
                                                ULYSSES_INPUT_PARAMETERS, const at::Tensor&, const at::Tensor&,
                                                const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                const at::Tensor&, c10::SymIntArrayRef sizes, ULYSSES_CALL_PARAMETERS,
                                                int64_t requires_grad_mask) {
  (void)std::forward_as_tuple(ULYSSES_INPUT_ARGUMENTS, ULYSSES_CALL_ARGUMENTS);
  const auto options = grad_out.options();
  const auto like = [](const at::Tensor& x) { return empty(x.sym_sizes().vec(), x.options()); };
  return {empty({sizes[0], sizes[1], sizes[2], sizes[3]}, options),
          empty({sizes[0], sizes[4], sizes[5], sizes[3]}, options),
          empty({sizes[0], sizes[4], sizes[5], sizes[6]}, options),
          (requires_grad_mask & contract::kGradMask) != 0 ? like(*attn_mask) : nothing(options),
          sinks ? like(*sinks) : nothing(options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(ulysses, Meta, library) {
  library.impl("attention", attention_meta);
  library.impl("attention_forward", attention_forward_meta);
  library.impl("attention_backward", attention_backward_meta);
}

}  // namespace ulysses::bindings
