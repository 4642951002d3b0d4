#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ulysses::exchange {

// Exact 64-bit sums of a dense tensor's bits, for comparing content between ranks: bit patterns weighted by their
// place, modulo 2^64, so that they do not depend on strides or on the order of summation, and see swapped elements.
// Any dtype; −0 differs from 0, and a NaN equals itself.

int64_t checksum(const at::Tensor& tensor);

// One per head of [B, tokens, heads, D].
std::vector<int64_t> head_checksums(const at::Tensor& tensor);

}  // namespace ulysses::exchange
