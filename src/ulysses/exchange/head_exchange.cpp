#include "ulysses/exchange/head_exchange.h"

#include <ATen/ops/empty.h>

#include <numeric>

#include "ulysses/exchange/token_rows.h"

namespace ulysses::exchange {
namespace {

using partition::Range;

int64_t row_elements(const std::vector<HeadItem>& items, size_t rank) {
  int64_t elements = 0;
  for (const HeadItem& item : items) elements += (*item.heads)[rank].size() * item.tensor.size(3);
  return elements;
}

// Elements sent to, or received from, each rank: tokens(p) · B · row(p).
std::vector<int64_t> counts_per_rank(size_t ranks, auto&& tokens, auto&& row, int64_t batch) {
  std::vector<int64_t> counts(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) counts[rank] = tokens(rank) * batch * row(rank);
  return counts;
}

// Copies the joint rows' heads of this rank to their place in the buffer.
void fill_joint_rows(const std::vector<HeadItem>& items, const RowsBeside& joint, size_t self, at::Tensor& rows) {
  at::Tensor place = rows.narrow(0, joint.in_front ? 0 : rows.size(0) - joint.count, joint.count);
  int64_t offset = 0;
  for (const HeadItem& item : items) {
    const Range heads = (*item.heads)[self];
    const int64_t begin = joint.in_front ? 0 : item.tensor.size(1) - joint.count;
    copy_rows(place, offset, item.tensor.narrow(1, begin, joint.count).narrow(2, heads.begin, heads.size()));
    offset += heads.size() * item.tensor.size(3);
  }
}

// Adds or copies what each rank sent of one item into [B, rows, H, D].
at::Tensor unpack_item(const HeadItem& item, const std::vector<at::Tensor>& chunks, const std::vector<int64_t>& offsets,
                       int64_t rows) {
  const int64_t head_dim = item.tensor.size(3);
  const int64_t length = chunks.front().size(0);
  const bool sum = partition::overlaps(*item.heads);
  const auto options = item.tensor.options();
  at::Tensor result = at::empty({item.tensor.size(0), rows, item.num_heads, head_dim}, options);
  const at::ScalarType wide = accumulate_dtype(item.tensor.scalar_type());
  at::Tensor target =
      sum && wide != item.tensor.scalar_type() ? at::empty(result.sizes(), options.dtype(wide)) : result;
  if (sum) target.zero_();
  for (size_t rank = 0; rank < chunks.size(); ++rank) {
    const Range heads = (*item.heads)[rank];
    if (heads.empty() || length == 0) continue;
    const at::Tensor part = head_slice(chunks[rank], offsets[rank], heads.size(), head_dim).transpose(0, 1);
    at::Tensor place = target.narrow(1, 0, length).narrow(2, heads.begin, heads.size());
    sum ? place.add_(part) : place.copy_(part);
  }
  if (!target.is_same(result)) result.copy_(target);
  if (rows > length) result.narrow(1, length, rows - length).zero_();
  return result;
}

}  // namespace

std::vector<at::Tensor> head_views(const at::Tensor& rows, const std::vector<int64_t>& heads,
                                   const std::vector<int64_t>& head_dims) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (size_t item = 0; item < heads.size(); ++item) {
    views.push_back(head_slice(rows, offset, heads[item], head_dims[item]).transpose(0, 1));
    offset += heads[item] * head_dims[item];
  }
  return views;
}

HeadBuffer seq_to_head(const std::vector<HeadItem>& items, const std::vector<int64_t>& lengths, const Group& group,
                       const RowsBeside& joint) {
  const size_t ranks = lengths.size();
  const auto self = static_cast<size_t>(group.rank());
  const int64_t batch = items.front().tensor.size(0);
  const int64_t length = lengths[self];
  const int64_t global_length = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const int64_t own_begin = joint.in_front ? joint.count : 0;
  const auto row = [&](size_t rank) { return row_elements(items, rank); };

  std::vector<int64_t> send_counts = counts_per_rank(
      ranks, [&](size_t) { return length; }, row, batch);
  at::Tensor send =
      at::empty({std::accumulate(send_counts.begin(), send_counts.end(), int64_t{0})}, items.front().tensor.options());
  int64_t start = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    at::Tensor chunk = send.narrow(0, start, send_counts[rank]).view({length, batch, row(rank)});
    int64_t offset = 0;
    for (const HeadItem& item : items) {
      const Range heads = (*item.heads)[rank];
      copy_rows(chunk, offset, item.tensor.narrow(1, own_begin, length).narrow(2, heads.begin, heads.size()));
      offset += heads.size() * item.tensor.size(3);
    }
    start += send_counts[rank];
  }

  HeadBuffer buffer;
  buffer.rows = at::empty({global_length + joint.count, batch, row(self)}, send.options());
  at::Tensor recv =
      joint.count == 0 ? buffer.rows.view({-1}) : buffer.rows.narrow(0, own_begin, global_length).view({-1});
  group.rows_to_ranks(recv, send,
                      counts_per_rank(
                          ranks, [&](size_t p) { return lengths[p]; }, [&](size_t) { return row(self); }, batch),
                      std::move(send_counts));
  if (joint.count > 0) fill_joint_rows(items, joint, self, buffer.rows);
  std::vector<int64_t> heads, head_dims;
  for (const HeadItem& item : items) {
    heads.push_back((*item.heads)[self].size());
    head_dims.push_back(item.tensor.size(3));
  }
  buffer.views = head_views(buffer.rows, heads, head_dims);
  return buffer;
}

std::vector<at::Tensor> head_to_seq(const std::vector<HeadItem>& items, const std::vector<int64_t>& lengths,
                                    int64_t rows, const Group& group) {
  const size_t ranks = lengths.size();
  const auto self = static_cast<size_t>(group.rank());
  const int64_t batch = items.front().tensor.size(0);
  const int64_t length = lengths[self];
  const auto row = [&](size_t rank) { return row_elements(items, rank); };

  std::vector<at::Tensor> tensors;
  for (const HeadItem& item : items) tensors.push_back(item.tensor);
  const at::Tensor send = token_rows(tensors);  // a view when there is one token-major item
  std::vector<int64_t> recv_counts = counts_per_rank(
      ranks, [&](size_t) { return length; }, row, batch);
  at::Tensor recv = at::empty({std::accumulate(recv_counts.begin(), recv_counts.end(), int64_t{0})}, send.options());
  group.rows_to_ranks(recv, send.view({-1}), recv_counts,
                      counts_per_rank(
                          ranks, [&](size_t p) { return lengths[p]; }, [&](size_t) { return row(self); }, batch));

  std::vector<at::Tensor> chunks;
  int64_t start = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    chunks.push_back(recv.narrow(0, start, recv_counts[rank]).view({length, batch, row(rank)}));
    start += recv_counts[rank];
  }
  std::vector<at::Tensor> results;
  std::vector<int64_t> offsets(ranks, 0);
  for (const HeadItem& item : items) {
    results.push_back(unpack_item(item, chunks, offsets, rows));
    for (size_t rank = 0; rank < ranks; ++rank) offsets[rank] += (*item.heads)[rank].size() * item.tensor.size(3);
  }
  return results;
}

}  // namespace ulysses::exchange
