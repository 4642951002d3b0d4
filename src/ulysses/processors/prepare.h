#pragma once

#include "ulysses/processors/attention_processor.h"

namespace ulysses::processors {

// A call as seen by this rank, free of torch. Takes the tensors' metadata only.
contract::AttentionSpec describe(const strategy::Qkv& qkv, const CallTensors& extras, const exchange::Group& group,
                                 const contract::AttentionOptions& options, const UlyssesAttentionProcessor& backend,
                                 int64_t requires_grad_mask);

// Validates and compares with the other ranks; returns the plan, or raises the same error on every rank.
// Sets spec.mask_is_gathered, which the ranks must agree on.
strategy::AttentionPlan prepare(contract::AttentionSpec& spec, const at::Tensor& attn_mask,
                                const UlyssesAttentionProcessor& backend, const exchange::Group& group,
                                const at::Device& device, int64_t requires_grad_mask);

}  // namespace ulysses::processors
