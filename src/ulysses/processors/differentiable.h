#pragma once

#include "ulysses/processors/attention_processor.h"

namespace ulysses::processors {

// A strategy's two data movements as differentiable functions, so that a backend whose attend() is any differentiable
// code trains without writing a backward. Each runs its mirrored collective in backward on every rank.
// Comm: as the strategy's exchange and restore.
strategy::Qkv differentiable_exchange(const strategy::AttentionPlan& plan, const strategy::Strategy& strategy,
                                      const strategy::Qkv& shards, const exchange::Group& group);
AttentionResult differentiable_restore(const strategy::AttentionPlan& plan, const strategy::Strategy& strategy,
                                       const kernels::KernelOutput& local, const exchange::Group& group);

// A strategy's restore_backward, with grad.lse undefined where every number of it is zero: whether a rank's loss uses
// lse is its own affair, the exchange is everybody's, and behind it the kernel of the forward may stay.
// Reads one number from the device where plan.return_lse: such a backward cannot be captured in a CUDA graph.
kernels::KernelOutput restore_backward(const strategy::AttentionPlan& plan, const strategy::Strategy& strategy,
                                       const kernels::KernelOutput& grad, const exchange::Group& group);

// For a call whose inputs carry a tangent (torch.func.jvp, torch.autograd.forward_ad): its result would carry none,
// without a word. Errors: CP065.
void refuse_forward_derivative(const strategy::Qkv& qkv);

// For a backward that autograd runs in order to differentiate it again (create_graph=True): its collectives would drop
// the second derivative without a word. Errors: CP065.
void refuse_second_derivative();

}  // namespace ulysses::processors
