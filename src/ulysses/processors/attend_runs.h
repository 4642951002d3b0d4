#pragma once

#include <functional>

#include "ulysses/kernels/kernel.h"
#include "ulysses/processors/attend_call.h"
#include "ulysses/strategy/local_mask.h"

namespace ulysses::processors {

// What a call brings besides q, k and v.
struct CallTensors {
  at::Tensor attn_mask;  // [B, S_kv] or [B|1, H|1, S_q|1, S_kv]; undefined: none
  at::Tensor sinks;      // [H], equal on every rank; undefined: none
};

// What attend() is told about this rank's work, and the whole of what it is cut from.
struct AttendWork {
  strategy::LocalWork work;
  AttendCall call;  // its mask and sinks are those of the rank's heads; rows and heads are cut per run
  strategy::LocalMask mask;
};
AttendWork attend_work(const contract::AttentionOptions& options, const strategy::AttentionPlan& plan,
                       strategy::LocalWork work, strategy::LocalMask mask, const at::Tensor& sinks, bool trains);

using AttendFunction = std::function<kernels::KernelOutput(const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& v, const AttendCall& call)>;

// Calls attend once per uniform head run and contiguous range of query positions and puts rows and heads together
// again; never with an empty tensor. A rank without work gets an empty or zero result that stays attached to the
// received tensors, so that its backward runs too. Errors: CP052 when attend returns another shape or dtype than it
// must.
kernels::KernelOutput attend_runs(const AttendWork& work, const strategy::Qkv& views, const AttendFunction& attend);

struct LocalGrads {
  strategy::Qkv views;
  at::Tensor dmask;   // like the LocalMask; undefined unless asked for
  at::Tensor dsinks;  // [h]; undefined without sinks
};

// The hand-written backward over the same runs, for a kernel of the registry.
// grad.lse may be undefined: none.
LocalGrads attend_runs_backward(const AttendWork& work, const strategy::Qkv& views, const kernels::KernelOutput& local,
                                const kernels::KernelOutput& grad, bool mask_needs_grad);

}  // namespace ulysses::processors
