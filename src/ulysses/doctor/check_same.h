#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "ulysses/exchange/group.h"

namespace ulysses::doctor {

// Whether tensors that must be equal on every rank are: noise, weights, text embeddings. Returns if all are equal, bit
// for bit, in dtype, shape and values; else raises on every rank, naming each tensor that differs and the ranks that
// differ from the majority (from rank 0 where there is none).
// Tensors: dense, any dtype and shape, on any device of this rank; matched by name.
// Comm:    one small all-gather, two more if anything differs; every rank of the group must call it.
// Errors:  CP068; the group stays usable.
void check_same(const std::map<std::string, at::Tensor>& tensors, const exchange::Group& group);

}  // namespace ulysses::doctor
