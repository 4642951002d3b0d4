#pragma once

#include <ATen/ops/logsumexp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "sharded_attention.h"
#include "ulysses/processors/registry.h"

// A backend as another author writes it, and calls of both strategies for it.
namespace ulysses::testing {

// An author's attention in plain differentiable ops; K and V are read once per group of query heads.
inline kernels::KernelOutput plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const processors::AttendCall& call) {
  const int64_t num_q_per_kv = q.size(2) / k.size(2);
  const at::Tensor queries = q.unflatten(2, {k.size(2), num_q_per_kv}).permute({0, 2, 3, 1, 4});
  const double scale = call.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  at::Tensor scores = at::matmul(queries, k.permute({0, 2, 3, 1}).unsqueeze(2)) * scale;
  if (call.is_causal) {
    const at::Tensor rows = at::arange(call.q_positions.begin, call.q_positions.end).unsqueeze(1);
    const at::Tensor keys = at::arange(call.kv_positions.begin, call.kv_positions.end).unsqueeze(0);
    scores = scores.masked_fill(keys > rows, -std::numeric_limits<double>::infinity());
  }
  const at::Tensor lse = at::logsumexp(scores, {-1}, true);
  const at::Tensor out = at::matmul(at::exp(scores - lse), v.permute({0, 2, 1, 3}).unsqueeze(2));
  return {out.permute({0, 3, 1, 2, 4}).flatten(2, 3), lse.squeeze(-1).flatten(1, 2)};
}

class PlainProcessor : public processors::UlyssesAttentionProcessor {
 public:
  std::vector<std::string> supports() const override {
    return {"is_causal", "softmax_scale", "q_positions", "need_lse"};
  }

 protected:
  kernels::KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const processors::AttendCall& call) override {
    const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const kernels::KernelOutput result = plain_attention(q.to(wide), k.to(wide), v.to(wide), call);
    return {result.out.to(q.scalar_type()), result.lse};
  }
};

// Registered while it lives.
class Registered {
 public:
  Registered(std::string name, std::shared_ptr<processors::UlyssesAttentionProcessor> backend)
      : name_(std::move(name)) {
    processors::register_backend(name_, std::move(backend));
  }
  ~Registered() { processors::unregister_backend(name_); }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

 private:
  std::string name_;
};

inline ShardedCase case_of(int64_t seq_len, int64_t world, int64_t heads, int64_t kv_heads) {
  ShardedCase c;
  c.layout = c.kv_layout = partition::SequenceLayout(seq_len, world);
  c.attention.q_len = c.attention.kv_len = seq_len;
  c.attention.heads = heads;
  c.attention.kv_heads = kv_heads;
  c.attention.head_dim = c.attention.v_head_dim = 8;
  return c;
}

class EveryStrategyAndSize : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  ShardedCase sharded(int64_t seq_len, int64_t heads, int64_t kv_heads) const {
    ShardedCase c = case_of(seq_len, std::get<1>(GetParam()), heads, kv_heads);
    c.options.strategy = std::get<0>(GetParam());
    return c;
  }
};

}  // namespace ulysses::testing
