#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ulysses/contract/attention_spec.h"

namespace ulysses::contract {

// What the rules of check_attention read: a call with the dangerous questions answered once. A size is −1 and a
// pointer null when an earlier rule has reported it; later rules then say nothing about it.
struct CallFacts {
  explicit CallFacts(const AttentionSpec& call);

  const AttentionSpec& spec;
  bool q_is_4d, k_is_4d, v_is_4d;
  int64_t batch = -1, q_rows = -1, num_heads = -1, head_dim = -1;  // of q; rows without joint tokens
  int64_t k_rows = -1, num_kv_heads = -1;                          // of k
  int64_t v_head_dim = -1;                                         // of v
  bool group_is_legal;                                             // cp_size > 0, cp_rank inside
  const LayoutSpec* q_layout = nullptr;                            // legal lengths, one per rank of the group
  // Of k and v: q's own where the caller gave none; null for replicated K/V.
  const LayoutSpec* kv_layout = nullptr;
};

using CallProblems = std::vector<base::Problem>;
using CallRule = CallProblems (*)(const CallFacts&);

// The rules by subject; check_attention runs all of them and sorts what they report by id.
std::span<const CallRule> sequence_rules();  // CP002–CP015
std::span<const CallRule> tensor_rules();    // CP020–CP024
std::span<const CallRule> mask_rules();      // CP022, CP027, CP028, CP033, CP040
std::span<const CallRule> extra_rules();     // CP029, CP034, CP043, CP044
std::span<const CallRule> option_rules();    // CP001, CP005, CP025–CP050

// The problems of a layout's lists, whatever the call: CP012.
std::optional<base::Problem> check_layout_lists(std::string_view name, const LayoutSpec& layout);

}  // namespace ulysses::contract
