#pragma once

#include "ulysses/partition/sequence_layout.h"
#include "ulysses/processors/attention_processor.h"

namespace ulysses::processors {

// Context-parallel attention in one call: the backend that options.policy names does it, its forward differentiable by
// autograd. What torch.ops.ulysses.attention is for Python, with the same numbers.
// Shapes:  q [B, S_local, H, D], k [B, S_local, H_kv, D], v [B, S_local, H_kv, D_v] → out [B, S_local, H, D_v],
//          lse [B, H, S_local] when options.return_lse, else undefined. q, k, v and out are in options.qkv_format, as
//          views; the policy's output_restore_dim must then be its sequence dimension. The options.joint_len joint
//          tokens stand beside the rank's rows in q, k and v, and in out and lse.
// Dtype:   any float, equal for q, k and v; lse float32 (float64 for float64), differentiable. Autocast does not
//          reach this call: cast before it.
// Comm:    every rank of the group must call it, and its backward; the collectives are those of
//          UlyssesAttentionProcessor::forward.
// Errors:  base::Error with an id of docs/errors.md, the same on every rank: CP001–CP050 (the call), CP053 (an
//          overridden exchange), CP060, CP062 (the group), CP065 (a second derivative), CP066 (graph capture). CP052
//          (the result of attend() or of an overridden restore) is raised on the rank whose result is wrong, as is what
//          attend() throws; under agreement="always" the others get CP067.
AttentionResult ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const exchange::Group& group, const contract::AttentionOptions& options = {},
                                  const CallTensors& extras = {});

// The same by a backend that need not be registered; options.policy.backend_name is not read.
AttentionResult ulysses_attention(UlyssesAttentionProcessor& backend, const at::Tensor& q, const at::Tensor& k,
                                  const at::Tensor& v, const exchange::Group& group,
                                  const contract::AttentionOptions& options = {}, const CallTensors& extras = {});

// The same for shards of `layout`: options.layout becomes this one. Padding rows of out and of every gradient are zero.
AttentionResult ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const exchange::Group& group, const partition::SequenceLayout& layout,
                                  contract::AttentionOptions options = {}, const CallTensors& extras = {});

// This rank's rows of a whole sequence, zero rows behind where the layout pads. Differentiable: the slice's gradient
// inside zeros, to be summed over ranks.
// Shapes:  x [.., S_global, ..] → [.., padded_lengths[rank], ..] at `dim`. Comm: none.
// Errors:  CP012 (x's length is not the layout's), CP015 (rank).
at::Tensor shard(const at::Tensor& x, const partition::SequenceLayout& layout, int64_t rank, int64_t dim = 1);

}  // namespace ulysses::processors
