#pragma once

#include <functional>

#include "ulysses/kernels/kernel.h"
#include "ulysses/processors/attend_call.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::processors {

// What attend() is told about this rank's work; per run only the head start differs.
AttendCall attend_call(const contract::AttentionOptions& options, const strategy::AttentionPlan& plan,
                       const strategy::LocalWork& work, bool trains);

using AttendFunction = std::function<kernels::KernelOutput(const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& v, const AttendCall& call)>;

// Calls attend once per uniform head run and puts the heads together again; never with an empty tensor. A rank without
// work gets an empty or zero result that stays attached to the received tensors, so that its backward runs too.
// Errors: CP052 when attend returns another shape or dtype than it must.
kernels::KernelOutput attend_runs(const strategy::LocalWork& work, const strategy::Qkv& views, const AttendCall& call,
                                  const AttendFunction& attend);

// The hand-written backward over the same runs, for a kernel of the registry.
strategy::Qkv attend_runs_backward(const strategy::LocalWork& work, const strategy::Qkv& views,
                                   const kernels::KernelOutput& local, const at::Tensor& grad_out,
                                   const AttendCall& call);

}  // namespace ulysses::processors
