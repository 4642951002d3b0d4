#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ulysses/contract/capability.h"
#include "ulysses/contract/policy.h"

namespace ulysses::contract {

// What a rank knows about one tensor without touching its data.
struct TensorSpec {
  std::vector<int64_t> sizes;  // [B, S_local, H, D]
  std::string dtype;           // "float32", "bfloat16", "int64", …
  std::string device;          // "cpu", "cuda:0"
  bool is_floating = true;
  bool requires_grad = false;
};

// What a SequenceLayout tells the operation; absent when the caller gave none.
struct LayoutSpec {
  std::vector<int64_t> lengths;         // real tokens per rank
  std::vector<int64_t> padded_lengths;  // rows per rank
  std::optional<int64_t> cp_rank;       // the rank that the layout was made for
  std::string order = "contiguous";
  bool operator==(const LayoutSpec&) const = default;
};

// What the caller chose, apart from tensors and group. Named as in the public call.
struct AttentionOptions {
  UlyssesContextParallelPolicy policy;
  std::optional<int64_t> requested_cp_size;  // the caller's cp_size argument
  std::optional<LayoutSpec> layout;
  std::optional<LayoutSpec> kv_layout;  // defaults to layout
  std::string strategy = "ulysses";
  std::string kernel = "auto";
  std::string agreement = "auto";
  std::string qkv_format = "bshd";
  std::string kv_role = "sharded";
  std::string causal_alignment = "top_left";
  std::string outer = "ring";
  bool is_causal = false;
  bool return_lse = false;
  std::optional<double> softmax_scale;  // default 1 / sqrt(D)
  std::optional<double> softcap;        // softcap · tanh(scores / softcap)
  std::string mask_q, mask_kv;          // declared axes of the mask: "local", "global", "broadcast"; "" = by size
  std::string mask_type, sinks_type;    // what the caller passed as attn_mask or sinks, where it is no tensor
  // Joint tokens stand in q, k and v, in front of this rank's rows or behind them, equal on every rank.
  int64_t joint_len = 0;
  std::string joint_position = "prefix";
  std::vector<int64_t> joint_valid_lens;  // per sequence of the batch; empty: all of them
  std::string joint_problem;              // why the caller's joint tokens could not be put beside q, k and v
  std::vector<Feature> requested;         // features asked for by arguments that no field above describes
};

// One call of the operation on one rank, complete and free of torch: everything that can differ between ranks and
// every rule is decided from this before the first collective.
struct AttentionSpec : AttentionOptions {
  std::string op = "ulysses_attention";
  TensorSpec q, k, v;                   // joint tokens included
  std::optional<TensorSpec> attn_mask;  // [B, S_kv] or [B|1, H|1, S_q|1, S_kv]
  std::optional<TensorSpec> sinks;      // [H]
  bool mask_is_gathered = false;        // an earlier call has gathered this very mask: no rank may gather it again
  int64_t cp_rank = 0;
  int64_t cp_size = 1;  // size of the group

  std::vector<std::string> known_kernels;  // filled by the caller: registries live above this layer
  std::vector<std::string> known_backends;
  std::vector<std::string> backend_supports;  // AttendCall fields that the backend declares
};

// Which inputs of a call require a gradient, as bits.
enum RequiresGrad : int64_t { kGradQ = 1, kGradK = 2, kGradV = 4, kGradMask = 8, kGradSinks = 16 };

// Which tokens an axis of a mask stands for.
enum class MaskAxis {
  kBroadcast,  // one entry for all
  kLocal,      // this rank's rows, padding included
  kGlobal,     // the real tokens of all ranks, joint tokens included
};

std::string_view to_string(MaskAxis axis);  // the word of MaskLayout

struct MaskAxes {
  MaskAxis q = MaskAxis::kBroadcast;
  MaskAxis kv = MaskAxis::kGlobal;
  bool operator==(const MaskAxes&) const = default;
};

// How the mask of a legal call is read.
MaskAxes mask_axes(const AttentionSpec& spec);

// Every feature that the call uses, from its fields and `requested`; the operation's refusals are read from the
// capability table for exactly these.
std::vector<Feature> features_of(const AttentionSpec& spec);

// All violated rules of a call, in the order of their ids; empty if the call is legal.
std::vector<base::Problem> check_attention(const AttentionSpec& spec);

}  // namespace ulysses::contract
