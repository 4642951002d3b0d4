#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "ulysses/contract/attention_spec.h"
#include "ulysses/exchange/group.h"
#include "ulysses/processors/attend_runs.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::processors {

// [B, rows, H, D_v] and, when asked for, [B, H, rows] natural-log lse (else undefined); rows of joint tokens included.
struct AttentionResult {
  at::Tensor out;
  at::Tensor lse;
};

// What the exchange hands to attend(), and what backward needs of it.
struct Exchanged {
  strategy::Qkv views;
  strategy::Buffers buffers;
};

// A finished call with its intermediate tensors, for a caller that writes its own backward.
struct AttentionTrace {
  AttentionResult result;
  strategy::AttentionPlan plan;
  strategy::Buffers buffers;
  kernels::KernelOutput local;
};

// contract::RequiresGrad of the inputs, 0 while gradients are off.
int64_t requires_grad_bits(const strategy::Qkv& qkv, const CallTensors& extras);

// The base class of every backend: a template method that a subclass cannot skip a step of.
//   forward = validate (collect every problem) → agree → raise on every rank or none → exchange → attend
//             → under agreement="always", raise on every rank or none → restore → check
// A backend writes attend() and nothing else. One that overrides the exchange says so by overriding it; its K/V is
// then compared by content with what the ranks announce.
class UlyssesAttentionProcessor {
 public:
  virtual ~UlyssesAttentionProcessor() = default;

  // Context-parallel attention over the whole sequence; differentiable.
  // Shapes:  q [B, S_local, H, D], k [B, S_local, H_kv, D], v [B, S_local, H_kv, D_v] → out [B, S_local, H, D_v],
  //          lse [B, H, S_local], natural log, −inf for padding rows
  // Dtype:   any float; lse float32 (float64 for float64), differentiable.
  // Gradients: of what every rank holds alike (joint tokens, replicated K/V, sinks, masks) partial; summed over the
  //          ranks they are the gradient.
  // Comm:    every rank of the group must call it. ulysses: two collectives (three if q and k/v are sharded
  //          differently); allgather_kv: one, with joint tokens two; as many in backward (allgather_kv with joint
  //          tokens and lse: three). Replicated K/V, or a group of one: none. A mask's local axis: one more, the first
  //          time. One more, small, where ranks compare or exchange lengths, and one after attend() under
  //          agreement="always".
  // Errors:  every id that docs/errors.md lists up to CP062, and CP067.
  AttentionResult forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const exchange::Group& group,
                          const contract::AttentionOptions& options, const CallTensors& extras = {});

  // The same steps without autograd, keeping what a hand-written backward needs. requires_grad_mask:
  // contract::RequiresGrad.
  AttentionTrace run(const strategy::Qkv& qkv, const CallTensors& extras, const exchange::Group& group,
                     const contract::AttentionOptions& options, int64_t requires_grad_mask);

  // AttendCall fields that attend() honours, of: is_causal, softmax_scale, q_positions (causal queries that do not
  // start at position 0), need_lse, attn_mask, sinks, softcap. A field that is set and not declared is refused before
  // the exchange (CP050).
  virtual std::vector<std::string> supports() const { return {}; }

  // Says that a subclass replaces exchange() and restore(); see there.
  virtual bool overrides_exchange() const { return false; }

  // Further reasons of this backend to refuse a call, found before any communication.
  virtual std::vector<base::Problem> refusals(const contract::AttentionSpec& spec, bool backward) const;

 protected:
  // Local attention: q [B, Sq, h, D], k [B, Skv, h_kv, D], v [B, Skv, h_kv, D_v], strided, h % h_kv == 0, K/V complete
  // for these queries, never empty → out [B, Sq, h, D_v] like q and, if call.need_lse, lse [B, h, Sq] of any float
  // dtype, better float32.
  // Called 0–3 times a forward. Gradients flow through whatever differentiable code it runs.
  virtual kernels::KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const AttendCall& call) = 0;

  // Override both or none, and overrides_exchange() with them. The views must be laid out as the strategy's.
  virtual Exchanged exchange(const strategy::AttentionPlan& plan, const strategy::Strategy& strategy,
                             const strategy::Qkv& qkv, const exchange::Group& group);
  virtual AttentionResult restore(const strategy::AttentionPlan& plan, const strategy::Strategy& strategy,
                                  const kernels::KernelOutput& local, const exchange::Group& group);
};

}  // namespace ulysses::processors
