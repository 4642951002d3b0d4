#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ulysses/contract/attention_spec.h"
#include "ulysses/partition/sequence_layout.h"

namespace ulysses::processors {

// "float32", "bfloat16", "int64": torch's names as users write them.
std::string dtype_name(at::ScalarType dtype);

contract::TensorSpec tensor_spec(const at::Tensor& tensor, bool requires_grad);

// The part of a layout that the operation reads.
contract::LayoutSpec layout_spec(const partition::SequenceLayout& layout);

}  // namespace ulysses::processors
