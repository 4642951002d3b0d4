#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ulysses::doctor {

// The largest absolute value; 0 of nothing.
inline double largest(const at::Tensor& x) { return x.numel() == 0 ? 0 : x.abs().max().item<double>(); }

// An lse [B, H, S] as [B, S, H, 1], so that every tensor has its tokens in dim 1 and its heads in dim 2.
inline at::Tensor by_tokens(const at::Tensor& lse) { return lse.transpose(1, 2).unsqueeze(3); }

// A mask [B, S_kv] as [B, 1, 1, S_kv]; a 4-D one as it is.
inline at::Tensor four_dimensions(const at::Tensor& mask) {
  return mask.dim() == 2 ? mask.unsqueeze(1).unsqueeze(1) : mask;
}

// Where a 1-D tensor of flags is set, ascending.
inline std::vector<int64_t> places(const at::Tensor& flags) {
  const at::Tensor found = flags.nonzero().flatten().contiguous();
  return {found.const_data_ptr<int64_t>(), found.const_data_ptr<int64_t>() + found.numel()};
}

}  // namespace ulysses::doctor
