#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ulysses/exchange/head_exchange.h"
#include "ulysses/exchange/token_rows.h"
#include "ulysses/partition/head_ranges.h"
#include "ulysses/strategy/joint_rows.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {
namespace {

using exchange::column_as_lse;
using exchange::Group;
using exchange::HeadBuffer;
using exchange::lse_as_column;
using kernels::KernelOutput;
using partition::Range;

// Joint rows travel in no rank's share of the input. Their output is complete on the rank that owns the head, so every
// rank gets it with its own tokens: its message is [T | its tokens], and the gradient of it comes back the same way.
std::vector<int64_t> with_joint(const AttentionPlan& plan) {
  std::vector<int64_t> lengths = plan.lengths;
  for (int64_t& length : lengths) length += plan.joint_len;
  return lengths;
}

// [B, T + S, ·] in the order of positions → for each rank [T | its tokens], one behind the other.
at::Tensor for_every_rank(const AttentionPlan& plan, const at::Tensor& joined) {
  if (plan.joint_len == 0) return joined;
  const at::Tensor joint = joint_rows(plan, joined);
  std::vector<at::Tensor> parts;
  int64_t begin = plan.first_position();
  for (const int64_t length : plan.lengths) {
    parts.push_back(joint);
    parts.push_back(joined.narrow(1, begin, length));
    begin += length;
  }
  return at::cat(parts, 1);
}

// The way back: the joint rows of all ranks are summed, in rank order.
at::Tensor from_every_rank(const AttentionPlan& plan, const at::Tensor& parts) {
  if (plan.joint_len == 0) return parts;
  at::Tensor joint =
      parts.narrow(1, 0, plan.joint_len).to(exchange::accumulate_dtype(parts.scalar_type()), false, true);
  std::vector<at::Tensor> sequence;
  int64_t begin = 0;
  for (const int64_t length : plan.lengths) {
    if (begin > 0) joint.add_(parts.narrow(1, begin, plan.joint_len));
    sequence.push_back(parts.narrow(1, begin + plan.joint_len, length));
    begin += plan.joint_len + length;
  }
  return beside(plan, joint.to(parts.scalar_type()), at::cat(sequence, 1));
}

// [T | rows] → the order of the shard.
at::Tensor as_shard(const AttentionPlan& plan, const at::Tensor& joint_in_front, int64_t dim) {
  if (plan.joint_first || plan.joint_len == 0) return joint_in_front;
  return beside(plan, joint_in_front.narrow(dim, 0, plan.joint_len),
                joint_in_front.narrow(dim, plan.joint_len, joint_in_front.size(dim) - plan.joint_len), dim);
}

// A shard's gradient → [T | own real rows].
at::Tensor joint_in_front(const AttentionPlan& plan, const at::Tensor& shard) {
  if (plan.joint_first || plan.joint_len == 0) return shard;
  return at::cat({joint_rows(plan, shard), own_rows(plan, shard, plan.length())}, 1);
}

// DeepSpeed-Ulysses: tokens are exchanged for heads, each rank attends over the whole sequence with its heads, and
// the output goes back. Layout, steps and bytes: exchange/head_exchange.h.
class UlyssesStrategy final : public Strategy {
 public:
  std::string_view name() const override { return "ulysses"; }

  LocalWork local_work(const AttentionPlan& plan) const override {
    const Range heads = own(plan.heads.query, plan);
    const Range kv_heads = own(plan.heads.kv, plan);
    LocalWork work;
    work.num_kv_tokens = plan.joint_len + plan.kv_seq_len();
    work.q_head_begin = heads.begin;
    work.kv_head_begin = kv_heads.begin;
    work.q_positions = {{0, plan.joint_len + plan.seq_len()}};
    if (!heads.empty()) work.runs = partition::head_runs(heads, kv_heads, plan.num_heads / plan.num_kv_heads);
    return work;
  }

  bool attends_for_all() const override { return true; }

  Buffers exchange(const AttentionPlan& plan, const Qkv& qkv, const Group& group) const override {
    const exchange::HeadItem q{qkv.q, &plan.heads.query};
    const exchange::HeadItem k{qkv.k, &plan.heads.kv};
    const exchange::HeadItem v{qkv.v, &plan.heads.kv};
    const exchange::RowsBeside joint{plan.joint_len, plan.joint_first};
    if (!plan.split_layouts()) return {exchange::seq_to_head({q, k, v}, plan.lengths, group, joint).rows, {}};
    return {exchange::seq_to_head({q}, plan.lengths, group, joint).rows,
            exchange::seq_to_head({k, v}, plan.kv_lengths, group, joint).rows};
  }

  Qkv views(const AttentionPlan& plan, const Buffers& buffers, const Qkv&) const override {
    const int64_t h = own(plan.heads.query, plan).size();
    const int64_t h_kv = own(plan.heads.kv, plan).size();
    const int64_t d = plan.head_dim;
    const int64_t d_v = plan.v_head_dim;
    if (!plan.split_layouts()) {
      const auto qkv = exchange::head_views(buffers.q, {h, h_kv, h_kv}, {d, d, d_v});
      return {qkv[0], qkv[1], qkv[2]};
    }
    const auto kv = exchange::head_views(buffers.kv, {h_kv, h_kv}, {d, d_v});
    return {exchange::head_views(buffers.q, {h}, {d})[0], kv[0], kv[1]};
  }

  Qkv exchange_backward(const AttentionPlan& plan, const Qkv& grads, const Group& group) const override {
    const exchange::HeadItem q{own_rows(plan, grads.q, plan.seq_len()), &plan.heads.query, plan.num_heads};
    const exchange::HeadItem k{own_rows(plan, grads.k, plan.kv_seq_len()), &plan.heads.kv, plan.num_kv_heads};
    const exchange::HeadItem v{own_rows(plan, grads.v, plan.kv_seq_len()), &plan.heads.kv, plan.num_kv_heads};
    Qkv shards;
    if (!plan.split_layouts()) {
      // The same tokens do not mean the same padding.
      const auto parts = exchange::head_to_seq({q, k, v}, plan.lengths, std::max(plan.rows, plan.kv_rows), group);
      shards = {parts[0].narrow(1, 0, plan.rows), parts[1].narrow(1, 0, plan.kv_rows),
                parts[2].narrow(1, 0, plan.kv_rows)};
    } else {
      const at::Tensor dq = exchange::head_to_seq({q}, plan.lengths, plan.rows, group)[0];
      const auto kv = exchange::head_to_seq({k, v}, plan.kv_lengths, plan.kv_rows, group);
      shards = {dq, kv[0], kv[1]};
    }
    if (plan.joint_len == 0) return shards;
    return {beside(plan, own_heads(plan, grads.q, q), shards.q), beside(plan, own_heads(plan, grads.k, k), shards.k),
            beside(plan, own_heads(plan, grads.v, v), shards.v)};
  }

  KernelOutput restore(const AttentionPlan& plan, const KernelOutput& local, const Group& group) const override {
    const std::vector<int64_t> lengths = with_joint(plan);
    const int64_t length = lengths[static_cast<size_t>(plan.cp_rank)];
    const int64_t rows = plan.joint_len + plan.rows;
    const auto item = [&](const at::Tensor& x) {
      return exchange::HeadItem{for_every_rank(plan, x), &plan.heads.query, plan.num_heads};
    };
    std::vector<exchange::HeadItem> items = {item(local.out)};
    if (plan.return_lse) items.push_back(item(lse_as_column(local.lse, local.out.scalar_type())));
    const auto shards = exchange::head_to_seq(items, lengths, rows, group);
    KernelOutput result{as_shard(plan, shards[0], 1), {}};
    if (!plan.return_lse) return result;
    const at::Tensor lse = column_as_lse(shards[1], local.lse.scalar_type());
    lse.narrow(2, length, rows - length).fill_(kNoKeys);
    result.lse = as_shard(plan, lse, 2);
    return result;
  }

  KernelOutput restore_backward(const AttentionPlan& plan, const KernelOutput& grad,
                                const Group& group) const override {
    const auto item = [&](const at::Tensor& x) {
      return exchange::HeadItem{joint_in_front(plan, x), &plan.heads.query};
    };
    std::vector<exchange::HeadItem> items = {item(grad.out)};
    if (plan.return_lse) items.push_back(item(lse_as_column(grad.lse, grad.out.scalar_type())));
    auto views = exchange::seq_to_head(items, with_joint(plan), group).views;
    if (plan.return_lse)  // numbers again before anything is summed: [B, S, h, 1]
      views[1] = column_as_lse(views[1], grad.lse.scalar_type()).transpose(1, 2).unsqueeze(-1);
    for (at::Tensor& view : views) view = from_every_rank(plan, view);
    return {views[0], plan.return_lse ? views[1].squeeze(-1).transpose(1, 2) : at::Tensor()};
  }

  at::Tensor local_rows(const AttentionPlan&, const at::Tensor&) const override { return {}; }

  Needs backward_needs() const override { return {false, false, true}; }

 private:
  // [B, T, H, ·] with this rank's heads of the joint rows and zeros elsewhere: a partial gradient.
  static at::Tensor own_heads(const AttentionPlan& plan, const at::Tensor& joined, const exchange::HeadItem& item) {
    const Range heads = own(*item.heads, plan);
    at::Tensor all = at::zeros({joined.size(0), plan.joint_len, item.num_heads, joined.size(3)}, joined.options());
    all.narrow(2, heads.begin, heads.size()).copy_(joint_rows(plan, joined));
    return all;
  }

  static Range own(const std::vector<Range>& ranges, const AttentionPlan& plan) {
    return ranges[static_cast<size_t>(plan.cp_rank)];
  }
};

}  // namespace

const Strategy& ulysses_strategy() {
  static const UlyssesStrategy strategy;
  return strategy;
}

}  // namespace ulysses::strategy
