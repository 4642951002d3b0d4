#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "ulysses/exchange/head_exchange.h"
#include "ulysses/exchange/token_gather.h"
#include "ulysses/exchange/token_rows.h"
#include "ulysses/partition/sequence_layout.h"
#include "ulysses/strategy/joint_rows.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {
namespace {

using exchange::Group;
using kernels::KernelOutput;

// The literal recipe: K and V of every rank are gathered in one collective, local queries attend to all of them.
// Joint keys are not sent; the queries of joint tokens are spread over the ranks and their output is gathered.
// Shapes:  buffers.kv [T + S_global, B, H_kv · (D + D_v)], token rows.
// Comm:    forward one gather (Group::gather_rows), bytes per rank = (W − 1) · own K/V; backward one all-to-all of the
//          partial dK/dV of the other ranks' tokens, summed in rank order: a reduce-scatter in meaning. With joint
//          tokens one more of each, for their output and its gradient, and a third in backward for that of their lse.
class AllgatherKvStrategy final : public Strategy {
 public:
  std::string_view name() const override { return "allgather_kv"; }

  LocalWork local_work(const AttentionPlan& plan) const override {
    const int64_t begin = plan.first_position() + plan.begin();
    LocalWork work;
    work.num_kv_tokens = plan.joint_len + plan.kv_seq_len();
    work.q_positions = {{begin, begin + plan.length()}};
    work.runs = {{{0, plan.num_heads}, {0, plan.num_kv_heads}}};
    if (plan.joint_len > 0) {
      const int64_t first = (plan.joint_first ? 0 : plan.seq_len()) + share_begin(plan);
      work.q_positions.insert(work.q_positions.begin(), {first, first + share(plan)});
    }
    return work;
  }

  bool attends_for_all() const override { return false; }

  Buffers exchange(const AttentionPlan& plan, const Qkv& qkv, const Group& group) const override {
    const int64_t length = plan.kv_length();
    const at::Tensor local = exchange::token_rows({own_rows(plan, qkv.k, length), own_rows(plan, qkv.v, length)});
    const exchange::RowsBeside room{plan.joint_len, plan.joint_first};
    const at::Tensor rows = exchange::gather_tokens(local, plan.kv_lengths, group, room);
    if (plan.joint_len > 0)
      joint_rows(plan, rows, 0).copy_(exchange::token_rows({joint_rows(plan, qkv.k), joint_rows(plan, qkv.v)}));
    return {{}, rows};
  }

  Qkv views(const AttentionPlan& plan, const Buffers& buffers, const Qkv& shards) const override {
    const auto kv =
        exchange::head_views(buffers.kv, {plan.num_kv_heads, plan.num_kv_heads}, {plan.head_dim, plan.v_head_dim});
    return {local_rows(plan, shards.q), kv[0], kv[1]};
  }

  Qkv exchange_backward(const AttentionPlan& plan, const Qkv& grads, const Group& group) const override {
    const auto sequence = [&](const at::Tensor& x) { return own_rows(plan, x, plan.kv_seq_len()); };
    const at::Tensor rows =
        exchange::sum_tokens(exchange::token_rows({sequence(grads.k), sequence(grads.v)}), plan.kv_lengths, group);
    const auto kv =
        exchange::head_views(rows, {plan.num_kv_heads, plan.num_kv_heads}, {grads.k.size(3), grads.v.size(3)});
    const at::Tensor dk = pad_tokens(kv[0], plan.kv_rows);
    const at::Tensor dv = pad_tokens(kv[1], plan.kv_rows);
    if (plan.joint_len == 0) return {pad_tokens(grads.q, plan.rows), dk, dv};
    const at::Tensor dq = pad_tokens(grads.q.narrow(1, share(plan), plan.length()), plan.rows);
    return {beside(plan, spread(plan, grads.q.narrow(1, 0, share(plan))), dq),
            beside(plan, joint_rows(plan, grads.k), dk), beside(plan, joint_rows(plan, grads.v), dv)};
  }

  KernelOutput restore(const AttentionPlan& plan, const KernelOutput& local, const Group& group) const override {
    if (plan.joint_len == 0) return pad_rows(local, plan.rows, plan.return_lse);
    const int64_t own_share = share(plan);
    std::vector<at::Tensor> parts = {local.out.narrow(1, 0, own_share)};
    std::vector<int64_t> head_dims = {plan.v_head_dim};
    if (plan.return_lse) {
      parts.push_back(exchange::lse_as_column(local.lse.narrow(2, 0, own_share), local.out.scalar_type()));
      head_dims.push_back(parts[1].size(3));
    }
    const at::Tensor rows = exchange::gather_tokens(exchange::token_rows(parts), shares(plan), group);
    const auto joint = exchange::head_views(rows, std::vector<int64_t>(parts.size(), plan.num_heads), head_dims);
    const KernelOutput own = pad_rows({local.out.narrow(1, own_share, plan.length()),
                                       plan.return_lse ? local.lse.narrow(2, own_share, plan.length()) : at::Tensor()},
                                      plan.rows, plan.return_lse);
    KernelOutput shard{beside(plan, joint[0], own.out), {}};
    if (plan.return_lse) shard.lse = beside(plan, exchange::column_as_lse(joint[1], own.lse.scalar_type()), own.lse, 2);
    return shard;
  }

  KernelOutput restore_backward(const AttentionPlan& plan, const KernelOutput& grad,
                                const Group& group) const override {
    KernelOutput local{own_rows(plan, grad.out, plan.length()), {}};
    if (plan.return_lse) local.lse = own_rows(plan, grad.lse, plan.length(), 2);
    if (plan.joint_len == 0) return local;
    local.out = at::cat({sum_of_joint(plan, joint_rows(plan, grad.out), group), local.out}, 1);
    if (plan.return_lse) {
      const at::Tensor lse = joint_rows(plan, grad.lse, 2).transpose(1, 2).unsqueeze(-1);  // [B, T, H, 1]
      local.lse = at::cat({sum_of_joint(plan, lse, group).squeeze(-1).transpose(1, 2), local.lse}, 2);
    }
    return local;
  }

  // The rank's share of the joint rows in front of its own.
  at::Tensor local_rows(const AttentionPlan& plan, const at::Tensor& shard) const override {
    const at::Tensor own = own_rows(plan, shard, plan.length());
    if (plan.joint_len == 0) return own;
    return at::cat({joint_rows(plan, shard).narrow(1, share_begin(plan), share(plan)), own}, 1);
  }

  Needs backward_needs() const override { return {true, false, false}; }

 private:
  // How many of the joint queries each rank takes.
  static std::vector<int64_t> shares(const AttentionPlan& plan) {
    return partition::balanced_lengths(plan.joint_len, plan.cp_size);
  }
  static int64_t share(const AttentionPlan& plan) { return shares(plan)[static_cast<size_t>(plan.cp_rank)]; }
  static int64_t share_begin(const AttentionPlan& plan) {
    const std::vector<int64_t> counts = shares(plan);
    return std::accumulate(counts.begin(), counts.begin() + plan.cp_rank, int64_t{0});
  }

  // Rows of the share among T, zero elsewhere: a partial gradient.
  static at::Tensor spread(const AttentionPlan& plan, const at::Tensor& rows) {
    at::Tensor all = at::zeros({rows.size(0), plan.joint_len, rows.size(2), rows.size(3)}, rows.options());
    all.narrow(1, share_begin(plan), share(plan)).copy_(rows);
    return all;
  }

  // [B, T, H, ·] of every rank → the rank's share of their sum.
  static at::Tensor sum_of_joint(const AttentionPlan& plan, const at::Tensor& grad, const Group& group) {
    const at::Tensor rows = exchange::sum_tokens(exchange::token_rows({grad}), shares(plan), group);
    return exchange::head_views(rows, {grad.size(2)}, {grad.size(3)})[0];
  }
};

}  // namespace

const Strategy& allgather_kv_strategy() {
  static const AllgatherKvStrategy strategy;
  return strategy;
}

}  // namespace ulysses::strategy
