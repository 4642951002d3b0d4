#include "ulysses/strategy/strategy.h"

namespace ulysses::strategy {
namespace {

// A group of one: plain attention over the real rows, no communication.
class SingleRankStrategy final : public Strategy {
 public:
  std::string_view name() const override { return "single_rank"; }

  LocalWork local_work(const AttentionPlan& plan) const override {
    LocalWork work{plan.length(), plan.kv_length(), 0, 0, 0, {}};
    work.runs = {{{0, plan.num_heads}, {0, plan.num_kv_heads}}};
    return work;
  }

  Buffers exchange(const AttentionPlan&, const Qkv&, const exchange::Group&) const override { return {}; }

  Qkv views(const AttentionPlan& plan, const Buffers&, const Qkv& shards) const override {
    return {shards.q.narrow(1, 0, plan.length()), shards.k.narrow(1, 0, plan.kv_length()),
            shards.v.narrow(1, 0, plan.kv_length())};
  }

  Qkv exchange_backward(const AttentionPlan& plan, const Qkv& grads, const exchange::Group&) const override {
    return {pad_tokens(grads.q, plan.rows), pad_tokens(grads.k, plan.kv_rows), pad_tokens(grads.v, plan.kv_rows)};
  }

  kernels::KernelOutput restore(const AttentionPlan& plan, const kernels::KernelOutput& local,
                                const exchange::Group&) const override {
    return pad_rows(local, plan.rows, plan.return_lse);
  }

  at::Tensor restore_backward(const AttentionPlan& plan, const at::Tensor& grad_out,
                              const exchange::Group&) const override {
    return grad_out.narrow(1, 0, plan.length());
  }

  Needs backward_needs() const override { return {true, true, false}; }
};

}  // namespace

const Strategy& single_rank_strategy() {
  static const SingleRankStrategy strategy;
  return strategy;
}

}  // namespace ulysses::strategy
