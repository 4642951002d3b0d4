#pragma once

#include "ulysses/processors/attention_processor.h"

namespace ulysses::processors {

// kv_global_gathered by content: compares the keys and values that arrived here with checksums that every rank
// announces of its own shard. For backends that override the exchange.
// Comm: two small all-gathers. Errors: CP053 on every rank, naming the rank and the tokens.
void check_kv_content(const strategy::AttentionPlan& plan, const strategy::LocalWork& work, const strategy::Qkv& shards,
                      const strategy::Qkv& views, const exchange::Group& group);

// output_restore_dim: out must be [B, rows, H, D_v] again. Errors: CP052.
void check_output(const strategy::AttentionPlan& plan, const strategy::Qkv& shards, const AttentionResult& result);

}  // namespace ulysses::processors
