#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "ulysses/exchange/group.h"

namespace ulysses::doctor {

// Any context-parallel attention on local shards: q [B, S_local, H, D], k, v [B, S_local, H, D] → out like q.
using AttentionFunction = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;

// What one run over a group showed; equal on every rank.
struct AttentionCheck {
  std::string diagnosis;      // "ok", or one plain sentence
  double forward_error = -1;  // largest absolute error against float64; −1 where nothing could be compared
  double dq_error = -1, dk_error = -1, dv_error = -1;  // a gradient that does not come counts as zeros
  bool ok() const { return diagnosis == "ok"; }
  std::string text() const;  // the diagnosis, then the errors
};

// The doctor's plain case, asked of the ranks of `group`: runs `attention` forward and backward on small shards of a
// known sequence and says what is wrong with it, if anything. `is_causal` says what it is meant to be, by global
// position. What it raises is the diagnosis.
// Inputs:  made here on the CPU, equal on every rank; float32, B = 2, 8 tokens a rank, as many KV as query heads, a
//          multiple of cp_size, D = 16. The group must carry CPU tensors.
// Comm:    one call of `attention`, one backward and a small gather; some dozens where it is wrong. Every rank must
//          call it. A hang ends with the group's timeout.
AttentionCheck check_attention(const AttentionFunction& attention, const exchange::Group& group,
                               bool is_causal = false);

}  // namespace ulysses::doctor
