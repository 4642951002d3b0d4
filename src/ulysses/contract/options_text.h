#pragma once

#include <string_view>

#include "ulysses/contract/attention_spec.h"

namespace ulysses::contract {

// The options that carry no tensor sizes, as one string that an op schema and a compiled graph can hold:
// "key=value" lines, only what differs from the defaults, so the common call passes "".
// Keys:    strategy, kernel, agreement, qkv_format, kv_role, causal_alignment, outer, softcap, mask_q, mask_kv,
//          mask_type, sinks_type, joint_len, joint_position, joint_valid_lens, joint_problem, cp_size, cp_rank and
//          kv_cp_rank (of the layouts), order, requested (features, comma-separated), policy.<field> for each field.
// Errors:  internal for a key that is not one of these.
AttentionOptions options_from_text(std::string_view text);

// The policy's lines alone: "policy.pad_multiple=1\n…".
UlyssesContextParallelPolicy policy_from_text(std::string_view text);

}  // namespace ulysses::contract
