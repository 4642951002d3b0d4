#include <numeric>

#include "ulysses/exchange/head_exchange.h"
#include "ulysses/exchange/token_gather.h"
#include "ulysses/exchange/token_rows.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {
namespace {

using exchange::Group;
using kernels::KernelOutput;

// The literal recipe: K and V of every rank are gathered in one collective, local queries attend to all of them.
// Shapes:  buffers.kv [S_global, B, H_kv · (D + D_v)], token rows.
// Comm:    forward one gather (Group::gather_rows), bytes per rank = (W − 1) · own K/V; backward one all-to-all of the
//          partial dK/dV of the other ranks' tokens, summed in rank order: a reduce-scatter in meaning.
class AllgatherKvStrategy final : public Strategy {
 public:
  std::string_view name() const override { return "allgather_kv"; }

  LocalWork local_work(const AttentionPlan& plan) const override {
    const int64_t begin =
        std::accumulate(plan.lengths.begin(), plan.lengths.begin() + static_cast<int64_t>(plan.cp_rank), int64_t{0});
    LocalWork work{plan.length(), plan.kv_seq_len(), begin, 0, 0, {}};
    work.runs = {{{0, plan.num_heads}, {0, plan.num_kv_heads}}};
    return work;
  }

  Buffers exchange(const AttentionPlan& plan, const Qkv& qkv, const Group& group) const override {
    const at::Tensor local =
        exchange::token_rows({qkv.k.narrow(1, 0, plan.kv_length()), qkv.v.narrow(1, 0, plan.kv_length())});
    return {{}, exchange::gather_tokens(local, plan.kv_lengths, group)};
  }

  Qkv views(const AttentionPlan& plan, const Buffers& buffers, const Qkv& shards) const override {
    const auto kv =
        exchange::head_views(buffers.kv, {plan.num_kv_heads, plan.num_kv_heads}, {plan.head_dim, plan.v_head_dim});
    return {shards.q.narrow(1, 0, plan.length()), kv[0], kv[1]};
  }

  Qkv exchange_backward(const AttentionPlan& plan, const Qkv& grads, const Group& group) const override {
    const at::Tensor rows = exchange::sum_tokens(exchange::token_rows({grads.k, grads.v}), plan.kv_lengths, group);
    const auto kv =
        exchange::head_views(rows, {plan.num_kv_heads, plan.num_kv_heads}, {grads.k.size(3), grads.v.size(3)});
    return {pad_tokens(grads.q, plan.rows), pad_tokens(kv[0], plan.kv_rows), pad_tokens(kv[1], plan.kv_rows)};
  }

  KernelOutput restore(const AttentionPlan& plan, const KernelOutput& local, const Group&) const override {
    return pad_rows(local, plan.rows, plan.return_lse);
  }

  at::Tensor restore_backward(const AttentionPlan& plan, const at::Tensor& grad_out, const Group&) const override {
    return grad_out.narrow(1, 0, plan.length());
  }

  Needs backward_needs() const override { return {true, false, false}; }
};

}  // namespace

const Strategy& allgather_kv_strategy() {
  static const AllgatherKvStrategy strategy;
  return strategy;
}

}  // namespace ulysses::strategy
