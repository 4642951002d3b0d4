#include "ulysses/processors/tensor_spec.h"

#include <c10/core/ScalarType.h>

namespace ulysses::processors {

std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

contract::TensorSpec tensor_spec(const at::Tensor& tensor, bool requires_grad) {
  if (!tensor.defined()) return {{}, "undefined", "cpu", /*is_floating=*/false, requires_grad};
  return {tensor.sizes().vec(), dtype_name(tensor.scalar_type()), tensor.device().str(),
          at::isFloatingType(tensor.scalar_type()), requires_grad};
}

contract::LayoutSpec layout_spec(const partition::SequenceLayout& layout) {
  return {layout.lengths(), layout.padded_lengths(), layout.cp_rank(), "contiguous"};
}

}  // namespace ulysses::processors
