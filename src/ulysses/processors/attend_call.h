#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "ulysses/partition/head_ranges.h"

namespace ulysses::processors {

// What a backend's attend() is told about the tensors it gets. A value; nothing in it refers to ranks.
struct AttendCall {
  bool is_causal = false;               // a query sees keys at positions ≤ its own
  std::optional<double> softmax_scale;  // set only when the caller set it; else 1 / sqrt(D)
  partition::Range q_positions;         // global positions of the query rows
  partition::Range kv_positions;        // global positions of the key rows
  int64_t q_head_start = 0;             // global number of the first query head
  at::Tensor attn_mask;                 // [B|1, h|1, Sq|1, Skv] of these rows and heads: bool, true = visible, or float
  at::Tensor sinks;                     // [h], a logit per query head beside the scores; undefined: none
  std::optional<double> softcap;        // softcap · tanh(scores / softcap)
  bool need_lse = false;
  bool trains = false;          // gradients will be asked for, by autograd or by the caller's own backward
  std::string kernel = "auto";  // the caller's choice, for backends that use the kernel registry
};

}  // namespace ulysses::processors
