#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ulysses/exchange/group.h"

namespace ulysses::exchange {

// Rows of a result that a gather leaves to its caller: in front of the gathered ones, or behind.
struct RowsBeside {
  int64_t count = 0;
  bool in_front = true;
};

// Every rank's token rows side by side in rank order.
// Shapes:  local [lengths[rank], …] contiguous → [Σ lengths + beside.count, …]
// Comm:    one collective, Group::gather_rows; bytes per rank = (W − 1) · bytes of local. Lengths may differ.
at::Tensor gather_tokens(const at::Tensor& local, const std::vector<int64_t>& lengths, const Group& group,
                         const RowsBeside& beside = {});

// The transpose of gather_tokens: each rank's part of the sum over ranks of `partial`, a reduce-scatter in meaning.
// Sums in float32 (float64 for float64), in rank order; travels in partial's dtype.
// Shapes:  partial [Σ lengths, …] contiguous → [lengths[rank], …]
// Comm:    one all-to-all; bytes per rank = bytes of the other ranks' rows of partial.
at::Tensor sum_tokens(const at::Tensor& partial, const std::vector<int64_t>& lengths, const Group& group);

// The sum over ranks of tensors of one shape, in float32 (float64 for float64) and rank order, on every rank.
// Comm:    one collective, Group::gather_rows; bytes per rank = (W − 1) · bytes of x.
at::Tensor sum_over_ranks(const at::Tensor& x, const Group& group);

// What happens to the gradient of a gathered sequence.
enum class GatherGrad {
  kSum,    // reduce-scatter: for a loss that differs per rank
  kSlice,  // own rows: for the same loss computed on every rank
};

// The whole sequence on every rank, padding rows left out.
// Shapes:  x_local [.., rows, ..] with lengths[rank] real rows at `dim` → [.., Σ lengths, ..] contiguous
at::Tensor gather_sequence(const at::Tensor& x_local, const std::vector<int64_t>& lengths, int64_t dim,
                           const Group& group);
// Shapes:  grad [.., Σ lengths, ..] → [.., rows, ..], padding rows zero. Comm: one all-to-all for kSum, none for
// kSlice.
at::Tensor gather_sequence_backward(const at::Tensor& grad, const std::vector<int64_t>& lengths, int64_t rows,
                                    int64_t dim, GatherGrad mode, const Group& group);

}  // namespace ulysses::exchange
