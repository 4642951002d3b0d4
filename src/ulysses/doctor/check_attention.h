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
  double forward_error = -1;  // largest absolute error against float64; −1 where it was not reached
  double dq_error = -1, dk_error = -1, dv_error = -1;
  bool ok() const { return diagnosis == "ok"; }
  std::string text() const;  // the diagnosis, then the errors
};

// Runs `attention` on small shards of a known sequence and says what is wrong with it, if anything: which keys never
// reach which queries, keys that count more than once, rows out of order, a wrong scale, a mixed batch, gradients that
// are missing, partial or scaled. `is_causal` says what the attention is meant to be, by global position.
// Inputs:  made here on the CPU, equal on every rank; float32, S = shard_len · W, D ≥ S; well under a second. The
//          group must carry CPU tensors.
// Comm:    three or four calls of `attention`, one backward, and a small gather after each; every rank must call it.
AttentionCheck check_attention(const AttentionFunction& attention, const exchange::Group& group, bool is_causal = false,
                               int64_t shard_len = 8, int64_t num_heads = 4);

}  // namespace ulysses::doctor
