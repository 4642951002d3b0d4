#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>

#include "ulysses/exchange/head_exchange.h"
#include "ulysses/partition/head_ranges.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {
namespace {

using exchange::Group;
using exchange::HeadBuffer;
using kernels::KernelOutput;
using partition::Range;

// The lse [B, h, S] as one more column [B, S, h, n] of out's rows, bit for bit in out's dtype.
at::Tensor lse_as_column(const at::Tensor& lse, at::ScalarType dtype) {
  return lse.transpose(1, 2).contiguous().unsqueeze(-1).view(dtype);
}

at::Tensor column_as_lse(const at::Tensor& column, at::ScalarType dtype) {
  return column.contiguous().view(dtype).squeeze(-1).transpose(1, 2).contiguous();
}

// DeepSpeed-Ulysses: tokens are exchanged for heads, each rank attends over the whole sequence with its heads, and
// the output goes back. Layout, steps and bytes: exchange/head_exchange.h.
class UlyssesStrategy final : public Strategy {
 public:
  std::string_view name() const override { return "ulysses"; }

  LocalWork local_work(const AttentionPlan& plan) const override {
    const Range heads = own(plan.heads.query, plan);
    const Range kv_heads = own(plan.heads.kv, plan);
    LocalWork work{plan.seq_len(), plan.kv_seq_len(), 0, heads.begin, kv_heads.begin, {}};
    if (!heads.empty()) work.runs = partition::head_runs(heads, kv_heads, plan.num_heads / plan.num_kv_heads);
    return work;
  }

  Buffers exchange(const AttentionPlan& plan, const Qkv& qkv, const Group& group) const override {
    const exchange::HeadItem q{qkv.q, &plan.heads.query};
    const exchange::HeadItem k{qkv.k, &plan.heads.kv};
    const exchange::HeadItem v{qkv.v, &plan.heads.kv};
    if (!plan.split_layouts()) return {exchange::seq_to_head({q, k, v}, plan.lengths, group).rows, {}};
    return {exchange::seq_to_head({q}, plan.lengths, group).rows,
            exchange::seq_to_head({k, v}, plan.kv_lengths, group).rows};
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
    const exchange::HeadItem q{grads.q, &plan.heads.query, plan.num_heads};
    const exchange::HeadItem k{grads.k, &plan.heads.kv, plan.num_kv_heads};
    const exchange::HeadItem v{grads.v, &plan.heads.kv, plan.num_kv_heads};
    if (!plan.split_layouts()) {
      // The same tokens do not mean the same padding.
      const auto shards = exchange::head_to_seq({q, k, v}, plan.lengths, std::max(plan.rows, plan.kv_rows), group);
      return {shards[0].narrow(1, 0, plan.rows), shards[1].narrow(1, 0, plan.kv_rows),
              shards[2].narrow(1, 0, plan.kv_rows)};
    }
    const at::Tensor dq = exchange::head_to_seq({q}, plan.lengths, plan.rows, group)[0];
    const auto kv = exchange::head_to_seq({k, v}, plan.kv_lengths, plan.kv_rows, group);
    return {dq, kv[0], kv[1]};
  }

  KernelOutput restore(const AttentionPlan& plan, const KernelOutput& local, const Group& group) const override {
    const exchange::HeadItem out{local.out, &plan.heads.query, plan.num_heads};
    if (!plan.return_lse) return {exchange::head_to_seq({out}, plan.lengths, plan.rows, group)[0], {}};
    const exchange::HeadItem lse{lse_as_column(local.lse, local.out.scalar_type()), &plan.heads.query, plan.num_heads};
    const auto shards = exchange::head_to_seq({out, lse}, plan.lengths, plan.rows, group);
    KernelOutput result{shards[0], column_as_lse(shards[1], local.lse.scalar_type())};
    result.lse.narrow(2, plan.length(), plan.rows - plan.length()).fill_(-std::numeric_limits<double>::infinity());
    return result;
  }

  at::Tensor restore_backward(const AttentionPlan& plan, const at::Tensor& grad_out,
                              const Group& group) const override {
    return exchange::seq_to_head({{grad_out, &plan.heads.query}}, plan.lengths, group).views[0];
  }

  Needs backward_needs() const override { return {false, false, true}; }

 private:
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
