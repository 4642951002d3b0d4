#include "ulysses/exchange/token_rows.h"

#include <ATen/ops/empty.h>

namespace ulysses::exchange {

at::ScalarType accumulate_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor head_slice(const at::Tensor& rows, int64_t offset, int64_t heads, int64_t head_dim) {
  return rows.narrow(2, offset, heads * head_dim).unflatten(2, {heads, head_dim});
}

void copy_rows(at::Tensor& rows, int64_t offset, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  head_slice(rows, offset, tensor.size(2), tensor.size(3)).copy_(tensor.transpose(0, 1));
}

at::Tensor lse_as_column(const at::Tensor& lse, at::ScalarType dtype) {
  return lse.transpose(1, 2).contiguous().unsqueeze(-1).view(dtype);
}

at::Tensor column_as_lse(const at::Tensor& column, at::ScalarType dtype) {
  return column.contiguous().view(dtype).squeeze(-1).transpose(1, 2).contiguous();
}

at::Tensor token_rows(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.front();
  if (tensors.size() == 1) return first.transpose(0, 1).contiguous().flatten(2);
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.size(2) * tensor.size(3);
  at::Tensor rows = at::empty({first.size(1), first.size(0), elements}, first.options());
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    copy_rows(rows, offset, tensor);
    offset += tensor.size(2) * tensor.size(3);
  }
  return rows;
}

}  // namespace ulysses::exchange
