#include "ulysses/exchange/token_gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "ulysses/exchange/token_rows.h"

namespace ulysses::exchange {
namespace {

int64_t total(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// Sizes of x with dim 0 replaced.
std::vector<int64_t> with_tokens(const at::Tensor& x, int64_t tokens) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] = tokens;
  return sizes;
}

int64_t elements_per_token(const at::Tensor& x) {
  int64_t elements = 1;
  for (int64_t dim = 1; dim < x.dim(); ++dim) elements *= x.size(dim);
  return elements;
}

}  // namespace

at::Tensor gather_tokens(const at::Tensor& local, const std::vector<int64_t>& lengths, const Group& group,
                         const RowsBeside& beside) {
  std::vector<int64_t> counts = lengths;
  for (int64_t& count : counts) count *= elements_per_token(local);
  at::Tensor gathered = at::empty(with_tokens(local, total(lengths) + beside.count), local.options());
  at::Tensor recv = beside.count == 0
                        ? gathered.view({-1})
                        : gathered.narrow(0, beside.in_front ? beside.count : 0, total(lengths)).view({-1});
  group.gather_rows(recv, local.view({-1}), counts);
  return gathered;
}

at::Tensor sum_tokens(const at::Tensor& partial, const std::vector<int64_t>& lengths, const Group& group) {
  const auto ranks = static_cast<int64_t>(lengths.size());
  const int64_t length = lengths[static_cast<size_t>(group.rank())];
  std::vector<int64_t> send_counts = lengths;
  for (int64_t& count : send_counts) count *= elements_per_token(partial);
  std::vector<int64_t> sizes = with_tokens(partial, length);
  sizes.insert(sizes.begin(), ranks);
  at::Tensor parts = at::empty(sizes, partial.options());
  at::Tensor recv = parts.view({-1});
  group.rows_to_ranks(recv, partial.view({-1}),
                      std::vector<int64_t>(lengths.size(), length * elements_per_token(partial)), send_counts);
  at::Tensor sum = parts.select(0, 0).to(accumulate_dtype(partial.scalar_type()));
  for (int64_t rank = 1; rank < ranks; ++rank) sum.add_(parts.select(0, rank));  // parts is ours to write
  return sum.to(partial.scalar_type());
}

at::Tensor sum_over_ranks(const at::Tensor& x, const Group& group) {
  const at::Tensor local = x.contiguous().view({1, -1});
  const at::Tensor all = gather_tokens(local, std::vector<int64_t>(static_cast<size_t>(group.size()), 1), group);
  at::Tensor sum = all[0].to(accumulate_dtype(x.scalar_type()));
  for (int64_t rank = 1; rank < group.size(); ++rank) sum.add_(all[rank]);
  return sum.to(x.scalar_type()).view(x.sizes());
}

at::Tensor gather_sequence(const at::Tensor& x_local, const std::vector<int64_t>& lengths, int64_t dim,
                           const Group& group) {
  const int64_t length = lengths[static_cast<size_t>(group.rank())];
  const at::Tensor local = x_local.narrow(dim, 0, length).movedim(dim, 0).contiguous();
  // The result must own its memory in row-major order, whatever the strides of the input: the op promises so.
  return gather_tokens(local, lengths, group).movedim(0, dim).contiguous();
}

at::Tensor gather_sequence_backward(const at::Tensor& grad, const std::vector<int64_t>& lengths, int64_t rows,
                                    int64_t dim, GatherGrad mode, const Group& group) {
  const auto self = static_cast<size_t>(group.rank());
  const int64_t length = lengths[self];
  std::vector<int64_t> sizes = grad.sizes().vec();
  sizes[static_cast<size_t>(dim)] = rows;
  at::Tensor result = at::zeros(sizes, grad.options());
  at::Tensor real_rows = result.narrow(dim, 0, length);
  if (mode == GatherGrad::kSum) {
    real_rows.copy_(sum_tokens(grad.movedim(dim, 0).contiguous(), lengths, group).movedim(0, dim));
  } else {
    const int64_t begin = std::accumulate(lengths.begin(), lengths.begin() + static_cast<int64_t>(self), int64_t{0});
    real_rows.copy_(grad.narrow(dim, begin, length));
  }
  return result;
}

}  // namespace ulysses::exchange
