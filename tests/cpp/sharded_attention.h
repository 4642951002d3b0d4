#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "reference_attention.h"
#include "ulysses/base/text.h"
#include "ulysses/exchange/group.h"
#include "ulysses/partition/sequence_layout.h"
#include "ulysses/processors/attention.h"
#include "ulysses/processors/tensor_spec.h"
#include "ulysses/transports/thread/thread_world.h"

// One attention case cut over thread ranks, run by any attention, and put together again.
namespace ulysses::testing {

struct ShardedCase {
  AttentionCase attention;
  partition::SequenceLayout layout = partition::SequenceLayout(1, 1);  // of q
  partition::SequenceLayout kv_layout = layout;
  contract::AttentionOptions options;  // layouts are filled in unless with_layouts is false
  bool with_layouts = true;
  bool backward = true;
};

inline std::string describe(const ShardedCase& c) {
  std::ostringstream text;
  text << describe(c.attention) << " strategy=" << c.options.strategy << " lengths=[" << base::join(c.layout.lengths())
       << "] padded=[" << base::join(c.layout.padded_lengths()) << "] kv_lengths=[" << base::join(c.kv_layout.lengths())
       << "]";
  return text.str();
}

inline contract::AttentionOptions options_of(const ShardedCase& c) {
  contract::AttentionOptions options = c.options;
  options.is_causal = c.attention.is_causal;
  options.softmax_scale = c.attention.softmax_scale;
  if (c.with_layouts) options.layout = processors::layout_spec(c.layout);
  if (c.with_layouts && c.kv_layout != c.layout) options.kv_layout = processors::layout_spec(c.kv_layout);
  return options;
}

// This rank's rows; what stands in padding rows is NaN, so that reading one shows.
inline at::Tensor poisoned_shard(const at::Tensor& x, const partition::SequenceLayout& layout, int64_t rank) {
  const at::Tensor real = processors::shard(x, layout, rank);
  const int64_t length = layout.lengths()[static_cast<size_t>(rank)];
  at::Tensor rows = real.clone();
  rows.narrow(1, length, rows.size(1) - length).fill_(std::numeric_limits<double>::quiet_NaN());
  return rows;
}

using ShardedAttention =
    std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const exchange::Group& group, const contract::AttentionOptions&)>;

inline std::pair<at::Tensor, at::Tensor> free_function(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                       const exchange::Group& group,
                                                       const contract::AttentionOptions& options) {
  const auto [out, lse] = processors::ulysses_attention(q, k, v, group, options);
  return {out, lse};
}

// The real rows of what each rank holds, in rank order; every padding row must hold `padding` in every place.
inline at::Tensor join(const std::vector<at::Tensor>& shards, const partition::SequenceLayout& layout, int64_t dim,
                       double padding) {
  std::vector<at::Tensor> real;
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    const int64_t length = layout.lengths()[rank], rows = layout.padded_lengths()[rank];
    EXPECT_EQ(shards[rank].size(dim), rows) << "rank " << rank;
    EXPECT_TRUE(shards[rank].narrow(dim, length, rows - length).eq(padding).all().item<bool>()) << "rank " << rank;
    real.push_back(shards[rank].narrow(dim, 0, length));
  }
  return at::cat(real, dim);
}

// Forward, and backward when the case says so, on W thread ranks. lse is joined when the options ask for it.
inline AttentionResult run_sharded(const ShardedCase& c, const AttentionInputs& in,
                                   const ShardedAttention& attention = free_function) {
  const auto ranks = static_cast<size_t>(c.layout.cp_size());
  std::vector<at::Tensor> out(ranks), lse(ranks), dq(ranks), dk(ranks), dv(ranks);
  transports::run_ranks(c.layout.cp_size(), [&](int64_t rank, const auto& process_group) {
    const auto self = static_cast<size_t>(rank);
    const exchange::Group group(process_group);
    const auto leaf = [&](const at::Tensor& x, const partition::SequenceLayout& layout) {
      return poisoned_shard(x, layout, rank).requires_grad_(c.backward);
    };
    const at::Tensor q = leaf(in.q, c.layout), k = leaf(in.k, c.kv_layout), v = leaf(in.v, c.kv_layout);
    const auto [local_out, local_lse] = attention(q, k, v, group, options_of(c));
    out[self] = local_out.detach();
    lse[self] = local_lse;
    if (!c.backward) return;
    local_out.backward(poisoned_shard(in.grad_out, c.layout, rank));
    dq[self] = q.grad(), dk[self] = k.grad(), dv[self] = v.grad();
  });
  AttentionResult result;
  result.out = join(out, c.layout, 1, 0.0);
  if (c.options.return_lse) result.lse = join(lse, c.layout, 2, -std::numeric_limits<double>::infinity());
  if (!c.backward) return result;
  result.dq = join(dq, c.layout, 1, 0.0);
  result.dk = join(dk, c.kv_layout, 1, 0.0);
  result.dv = join(dv, c.kv_layout, 1, 0.0);
  return result;
}

// Against the float64 reference, lse too.
inline void check_sharded(ShardedCase c, const ShardedAttention& attention = free_function) {
  SCOPED_TRACE(describe(c));
  c.options.return_lse = true;
  const AttentionInputs in = random_inputs(c.attention);
  expect_result(run_sharded(c, in, attention), in, c.attention);
}

}  // namespace ulysses::testing
