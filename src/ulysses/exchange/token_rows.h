#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ulysses::exchange {

// Token rows: [tokens, B, Σ heads_i · D_i], the layout in which everything travels. Grouping by destination, and
// joining what arrives, are then slices of dim 0.

// float32, or float64 for float64: the type in which partial results of several ranks are summed.
at::ScalarType accumulate_dtype(at::ScalarType dtype);

// A [tokens, B, heads, head_dim] view of a range of the last dimension of rows.
at::Tensor head_slice(const at::Tensor& rows, int64_t offset, int64_t heads, int64_t head_dim);

// rows[:, :, offset : offset + heads · D] = tensor, for tensor [B, tokens, heads, D] of any strides.
void copy_rows(at::Tensor& rows, int64_t offset, const at::Tensor& tensor);

// Contiguous token rows of tensors [B, tokens, heads_i, D_i] side by side; no copy for one tensor that already is
// token-major in memory.
at::Tensor token_rows(const std::vector<at::Tensor>& tensors);

// The lse [B, h, S] as one more column [B, S, h, n] of rows of `dtype`, bit for bit, and back.
at::Tensor lse_as_column(const at::Tensor& lse, at::ScalarType dtype);
at::Tensor column_as_lse(const at::Tensor& column, at::ScalarType dtype);

}  // namespace ulysses::exchange
