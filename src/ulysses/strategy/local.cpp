#include "ulysses/strategy/joint_rows.h"
#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {
namespace {

using kernels::KernelOutput;

// Plain attention of the rank's own queries over keys that it holds whole: a group of one, or replicated K/V, where dK
// and dV are this rank's part. No communication.
class LocalStrategy final : public Strategy {
 public:
  std::string_view name() const override { return "local"; }

  LocalWork local_work(const AttentionPlan& plan) const override {
    LocalWork work;
    work.num_kv_tokens = plan.kv_length() + plan.joint_len;
    work.q_positions = {{plan.begin(), plan.begin() + plan.length() + plan.joint_len}};
    work.runs = {{{0, plan.num_heads}, {0, plan.num_kv_heads}}};
    return work;
  }

  bool attends_for_all() const override { return false; }

  Buffers exchange(const AttentionPlan&, const Qkv&, const exchange::Group&) const override { return {}; }

  Qkv views(const AttentionPlan& plan, const Buffers&, const Qkv& shards) const override {
    return {local_rows(plan, shards.q), real_rows(plan, shards.k, plan.kv_length()),
            real_rows(plan, shards.v, plan.kv_length())};
  }

  Qkv exchange_backward(const AttentionPlan& plan, const Qkv& grads, const exchange::Group&) const override {
    return {shard_of(plan, grads.q, plan.rows), shard_of(plan, grads.k, plan.kv_rows),
            shard_of(plan, grads.v, plan.kv_rows)};
  }

  KernelOutput restore(const AttentionPlan& plan, const KernelOutput& local, const exchange::Group&) const override {
    return {shard_of(plan, local.out, plan.rows),
            plan.return_lse ? shard_of(plan, local.lse, plan.rows, 2, kNoKeys) : at::Tensor()};
  }

  KernelOutput restore_backward(const AttentionPlan& plan, const KernelOutput& grad,
                                const exchange::Group&) const override {
    KernelOutput local{real_rows(plan, grad.out, plan.length()), {}};
    if (plan.return_lse) local.lse = real_rows(plan, grad.lse, plan.length(), 2);
    return local;
  }

  at::Tensor local_rows(const AttentionPlan& plan, const at::Tensor& shard) const override {
    return real_rows(plan, shard, plan.length());
  }

  Needs backward_needs() const override { return {true, true, false}; }
};

}  // namespace

const Strategy& local_strategy() {
  static const LocalStrategy strategy;
  return strategy;
}

}  // namespace ulysses::strategy
