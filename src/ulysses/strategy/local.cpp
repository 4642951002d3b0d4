#include <numeric>

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
    const int64_t begin =
        std::accumulate(plan.lengths.begin(), plan.lengths.begin() + static_cast<int64_t>(plan.cp_rank), int64_t{0});
    LocalWork work;
    work.num_kv_tokens = plan.kv_length() + plan.joint_len;
    work.q_positions = {{begin, begin + plan.length() + plan.joint_len}};
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
    return {grad_of_shard(plan, grads.q, plan.length(), plan.rows),
            grad_of_shard(plan, grads.k, plan.kv_length(), plan.kv_rows),
            grad_of_shard(plan, grads.v, plan.kv_length(), plan.kv_rows)};
  }

  KernelOutput restore(const AttentionPlan& plan, const KernelOutput& local, const exchange::Group&) const override {
    return shard_of(plan, local);
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

 private:
  static at::Tensor grad_of_shard(const AttentionPlan& plan, const at::Tensor& grad, int64_t length, int64_t rows) {
    if (plan.joint_first || plan.joint_len == 0) return pad_tokens(grad, rows + plan.joint_len);
    return beside(plan, joint_rows(plan, grad), pad_tokens(own_rows(plan, grad, length), rows));
  }
};

}  // namespace

const Strategy& local_strategy() {
  static const LocalStrategy strategy;
  return strategy;
}

}  // namespace ulysses::strategy
