#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ulysses/exchange/group.h"
#include "ulysses/exchange/token_gather.h"
#include "ulysses/partition/head_ranges.h"

namespace ulysses::exchange {

// One tensor of a bundle that travels together, and the heads of it that each rank owns or needs.
struct HeadItem {
  at::Tensor tensor;                           // seq side [B, rows, H, D]; head side [B, S_global, h, D]
  const std::vector<partition::Range>* heads;  // per rank; ranges of neighbours may overlap
  int64_t num_heads = 0;                       // H, read by head_to_seq
};

// The received rows of a bundle: [S_global, B, Σ h_i · D_i], already in global token order.
struct HeadBuffer {
  at::Tensor rows;
  std::vector<at::Tensor> views;  // per item [B, S_global, h, D], strided views of rows
};

// The strided views of `rows` for items with h_i heads of size D_i.
std::vector<at::Tensor> head_views(const at::Tensor& rows, const std::vector<int64_t>& heads,
                                   const std::vector<int64_t>& head_dims);

// Token-major fused exchange: every rank gives its tokens of all heads and gets all tokens of its heads.
// Packs in one pass into (destination, token, batch, [heads of item 0 | item 1 | …], D); nothing is unpacked.
// Shapes:  items [B, rows ≥ lengths[rank], H, D] → views [B, S_global, h, D]; rows behind lengths[rank] do not travel.
//          `joint`: rows that every rank has, in front of its own or behind: they do not travel either; their heads of
//          this rank stand in the views in front of the sequence or behind it.
// Comm:    one all-to-all; bytes per rank = lengths[rank] · B · Σ_{p≠rank} Σ_i h_i(p) · D_i · element size.
// Source:  DeepSpeed-Ulysses (arXiv 2309.14509) §3; deviation: q, k, v in one token-major message, uneven ranges.
HeadBuffer seq_to_head(const std::vector<HeadItem>& items, const std::vector<int64_t>& lengths, const Group& group,
                       const RowsBeside& joint = {});

// The inverse: every rank gives all tokens of its heads and gets its tokens of all heads. Where ranges overlap, what
// comes back is summed in float32 (float64 for float64), in rank order.
// Shapes:  items [B, S_global, h, D] → [B, rows, H, D] contiguous; rows behind lengths[rank] are zero.
// Comm:    one all-to-all; bytes per rank = Σ_{p≠rank} lengths[p] · B · Σ_i h_i(rank) · D_i · element size.
std::vector<at::Tensor> head_to_seq(const std::vector<HeadItem>& items, const std::vector<int64_t>& lengths,
                                    int64_t rows, const Group& group);

}  // namespace ulysses::exchange
