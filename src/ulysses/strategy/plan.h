#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ulysses/contract/attention_spec.h"
#include "ulysses/partition/head_ranges.h"

namespace ulysses::strategy {

// Everything the data path of one call needs, derived once from a spec that has passed every check. The strategies
// read it and decide nothing.
struct AttentionPlan {
  int64_t cp_rank = 0;
  int64_t cp_size = 1;
  std::vector<int64_t> lengths;     // real query tokens per rank
  std::vector<int64_t> kv_lengths;  // real key tokens per rank
  int64_t rows = 0;                 // local query rows, padding included, joint tokens not
  int64_t kv_rows = 0;              // local key rows, padding included, joint tokens not
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t v_head_dim = 0;
  partition::HeadRanges heads;            // per rank
  bool replicated_kv = false;             // every rank has all kv_rows keys
  int64_t joint_len = 0;                  // tokens of every rank, beside its own in q, k and v
  bool joint_first = true;                // in front of the sequence; else behind it
  std::vector<int64_t> joint_valid_lens;  // per sequence of the batch; empty: all of them
  std::optional<contract::MaskAxes> mask;
  bool is_causal = false;
  double softmax_scale = 1.0;
  bool return_lse = false;

  int64_t length() const { return lengths[static_cast<size_t>(cp_rank)]; }
  int64_t kv_length() const { return kv_lengths[static_cast<size_t>(cp_rank)]; }
  int64_t begin() const;                                                  // query tokens of the ranks before this one
  int64_t seq_len() const;                                                // S_global of q
  int64_t kv_seq_len() const;                                             // S_global of k and v
  int64_t first_position() const { return joint_first ? joint_len : 0; }  // of the sequence in the joined one
  // q and k/v are sharded differently, so they cannot share the rows of one message.
  bool split_layouts() const { return lengths != kv_lengths; }
};

// `exchanged` holds (query rows, key rows) per rank where the policy is uneven and there is no layout; else empty.
AttentionPlan make_plan(const contract::AttentionSpec& spec, const std::vector<std::vector<int64_t>>& exchanged);

// Lengths must be exchanged on every call: no layout says them and the policy allows them to differ.
bool exchanges_lengths(const contract::AttentionSpec& spec);

}  // namespace ulysses::strategy
