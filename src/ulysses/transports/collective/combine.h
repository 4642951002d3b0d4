#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ulysses::transports {

// Why values of this dtype cannot be reduced with this c10d::ReduceOp, empty if they can: SUM, AVG, PRODUCT, MIN, MAX,
// BAND, BOR, BXOR where the dtype has them.
std::string find_reduction_problem(at::ScalarType dtype, int64_t op);

// The ranks' blocks combined in rank order, so that every run and every rank gets the same bits: a new tensor [numel].
// Dtype:   16-bit and 8-bit floats are accumulated in float32.
at::Tensor combine(const std::vector<const std::byte*>& blocks, int64_t numel, at::ScalarType dtype, int64_t op);

}  // namespace ulysses::transports
