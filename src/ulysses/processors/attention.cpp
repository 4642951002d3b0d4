#include "ulysses/processors/attention.h"

#include <ATen/ops/constant_pad_nd.h>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/processors/registry.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::processors {

AttentionResult ulysses_attention(UlyssesAttentionProcessor& backend, const at::Tensor& q, const at::Tensor& k,
                                  const at::Tensor& v, const exchange::Group& group,
                                  const contract::AttentionOptions& options, const CallTensors& extras) {
  // [B, S, H, D] of the caller's format, or back: both swap the same two dimensions.
  const int64_t dim = contract::sequence_dim(options.qkv_format);
  const auto formatted = [dim](const at::Tensor& x) {
    return dim == 1 || !x.defined() || x.dim() != 4 ? x : x.transpose(1, dim);
  };
  AttentionResult result = backend.forward(formatted(q), formatted(k), formatted(v), group, options, extras);
  result.out = formatted(result.out);
  return result;
}

AttentionResult ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const exchange::Group& group, const contract::AttentionOptions& options,
                                  const CallTensors& extras) {
  return ulysses_attention(*backend_of(options.policy), q, k, v, group, options, extras);
}

AttentionResult ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const exchange::Group& group, const partition::SequenceLayout& layout,
                                  contract::AttentionOptions options, const CallTensors& extras) {
  options.layout = layout_spec(layout);
  return ulysses_attention(q, k, v, group, options, extras);
}

at::Tensor shard(const at::Tensor& x, const partition::SequenceLayout& layout, int64_t rank, int64_t dim) {
  const partition::Range tokens = layout.tokens(rank);
  if (dim < 0) dim += x.dim();
  const int64_t seq_len = dim >= 0 && dim < x.dim() ? x.size(dim) : -1;
  if (seq_len != layout.seq_len())
    throw base::Error({{"CP012", base::ErrorKind::kInvalidArgument,
                        base::cat("x ", x.sizes(), " is not seq_len=", layout.seq_len(), " long in dim=", dim), "",
                        base::cat("pass the whole sequence of ", layout.seq_len(), " tokens and its dimension")}},
                      "shard", rank, layout.cp_size());
  const int64_t padding = layout.padded_lengths()[static_cast<size_t>(rank)] - tokens.size();
  const at::Tensor rows = x.narrow(dim, tokens.begin, tokens.size());
  if (padding == 0) return rows;
  // Pairs (before, after) from the last dimension to this one.
  std::vector<int64_t> pairs(static_cast<size_t>(2 * (x.dim() - dim)), 0);
  pairs.back() = padding;
  return at::constant_pad_nd(rows, pairs);
}

}  // namespace ulysses::processors
