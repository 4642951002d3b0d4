#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

// The schemas of the operator library "ulysses", and C++ signatures that match them. One place for both.
namespace ulysses::bindings {

// Arguments of bindings/ops_call.h, in schema order.
#define ULYSSES_CALL_SCHEMA                                                                                    \
  "str group_name, int cp_size, int cp_rank, SymInt[] lengths, SymInt[] padded_lengths, SymInt[] kv_lengths, " \
  "SymInt[] kv_padded_lengths, bool is_causal, float? softmax_scale, bool return_lse, str config"
#define ULYSSES_CALL_PARAMETERS                                                                                  \
  std::string_view group_name, int64_t cp_size, int64_t cp_rank, c10::SymIntArrayRef lengths,                    \
      c10::SymIntArrayRef padded_lengths, c10::SymIntArrayRef kv_lengths, c10::SymIntArrayRef kv_padded_lengths, \
      bool is_causal, std::optional<double> softmax_scale, bool return_lse, std::string_view config
#define ULYSSES_CALL_ARGUMENTS                                                                                    \
  group_name, cp_size, cp_rank, lengths, padded_lengths, kv_lengths, kv_padded_lengths, is_causal, softmax_scale, \
      return_lse, config

// The tensors of a call; joint tokens stand in q, k and v.
#define ULYSSES_INPUT_SCHEMA "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? sinks"
#define ULYSSES_INPUT_PARAMETERS                                                                            \
  const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const std::optional<at::Tensor>&attn_mask, \
      const std::optional<at::Tensor>&sinks
#define ULYSSES_INPUT_ARGUMENTS q, k, v, attn_mask, sinks

// The public operation. lse is empty unless return_lse.
inline constexpr const char* kAttentionSchema =
    "attention(" ULYSSES_INPUT_SCHEMA ", " ULYSSES_CALL_SCHEMA ") -> (Tensor out, Tensor lse)";
using Attention = std::tuple<at::Tensor, at::Tensor>(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS);

// attention plus what its backward reads; tensors that a strategy has no use for are empty.
//   saved_q, saved_kv: what the exchange received; saved_out [Sq, B, h, D_v], saved_lse [B, h, Sq]: the local result;
//   saved_lengths: int64, query then key tokens per rank where they were exchanged (on the CPU), else empty.
// requires_grad_mask: contract::RequiresGrad; compared across ranks, because backward is a collective too.
inline constexpr const char* kAttentionForwardSchema =
    "attention_forward(" ULYSSES_INPUT_SCHEMA ", " ULYSSES_CALL_SCHEMA
    ", int requires_grad_mask) -> (Tensor out, Tensor lse, Tensor saved_q, Tensor saved_kv, Tensor saved_out, "
    "Tensor saved_lse, Tensor saved_lengths)";
using AttentionForwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using AttentionForward = AttentionForwardResult(ULYSSES_INPUT_PARAMETERS, ULYSSES_CALL_PARAMETERS, int64_t);

// q, k, v are read only where the strategy keeps shards; else they may be empty. sizes: [B, rows, H, D, kv_rows, H_kv,
// D_v], joint rows included. grad_lse: None where nobody used lse. dmask is empty unless asked for, dsinks without
// sinks.
inline constexpr const char* kAttentionBackwardSchema =
    "attention_backward(Tensor grad_out, Tensor? grad_lse, " ULYSSES_INPUT_SCHEMA
    ", Tensor out, Tensor saved_q, Tensor saved_kv, Tensor saved_out, Tensor saved_lse, Tensor saved_lengths, "
    "SymInt[] sizes, " ULYSSES_CALL_SCHEMA
    ", int requires_grad_mask) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor dsinks)";
using AttentionBackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using AttentionBackward = AttentionBackwardResult(const at::Tensor&, const std::optional<at::Tensor>&,
                                                  ULYSSES_INPUT_PARAMETERS, const at::Tensor&, const at::Tensor&,
                                                  const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                  const at::Tensor&, c10::SymIntArrayRef, ULYSSES_CALL_PARAMETERS,
                                                  int64_t);

// SequenceLayout.gather. grad: "sum" or "slice".
inline constexpr const char* kGatherSequenceSchema =
    "gather_sequence(Tensor x_local, str group_name, int cp_rank, SymInt[] lengths, int dim, str grad) -> Tensor";
using GatherSequence = at::Tensor(const at::Tensor&, std::string_view, int64_t, c10::SymIntArrayRef, int64_t,
                                  std::string_view);
inline constexpr const char* kGatherSequenceBackwardSchema =
    "gather_sequence_backward(Tensor grad_gathered, SymInt rows, str group_name, int cp_rank, SymInt[] lengths, "
    "int dim, str grad) -> Tensor";
using GatherSequenceBackward = at::Tensor(const at::Tensor&, c10::SymInt, std::string_view, int64_t,
                                          c10::SymIntArrayRef, int64_t, std::string_view);

// kernels::merge_attention: differentiable ATen ops and nothing else, so autograd and tracing see through it.
inline constexpr const char* kMergeAttentionSchema =
    "merge_attention(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)";

// The identity whose backward is sum_over_ranks.
inline constexpr const char* kSumGradSchema = "sum_grad(Tensor x, str group_name) -> Tensor";
inline constexpr const char* kSumOverRanksSchema = "sum_over_ranks(Tensor x, str group_name) -> Tensor";
using SumOverRanks = at::Tensor(const at::Tensor&, std::string_view);

// An op of this library, to be called through the dispatcher. Look it up once and keep it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace ulysses::bindings
