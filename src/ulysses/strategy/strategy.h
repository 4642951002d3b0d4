#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "ulysses/exchange/group.h"
#include "ulysses/kernels/kernel.h"
#include "ulysses/strategy/plan.h"

namespace ulysses::strategy {

inline constexpr double kNoKeys = -std::numeric_limits<double>::infinity();  // lse of a row that sees nothing

struct Qkv {
  at::Tensor q, k, v;
};

// What the exchange received, kept for backward; undefined where nothing was received. See HeadBuffer, gather_tokens.
struct Buffers {
  at::Tensor q;   // Ulysses: the rows of q, or of q, k and v together
  at::Tensor kv;  // rows of k and v where they travelled without q
};

// What this rank attends with: which queries, which heads, from which global position.
struct LocalWork {
  int64_t num_kv_tokens = 0;                  // Skv
  int64_t q_head_begin = 0;                   // global number of the first query head
  int64_t kv_head_begin = 0;                  // global number of the first KV head
  std::vector<partition::Range> q_positions;  // global positions of the query rows, in their order; one or two
  std::vector<partition::HeadRun> runs;       // uniform head groups, at most three; empty for a rank without work

  int64_t num_tokens() const;  // Sq
};

// How a call is spread over the ranks: four pure data movements around the local attention, forward and backward side
// by side. Backward mirrors forward with the same collectives, so that every rank takes part whatever it owns.
class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual std::string_view name() const = 0;
  virtual LocalWork local_work(const AttentionPlan& plan) const = 0;
  // Whether a rank attends for the queries of all ranks, so that it needs the other ranks' rows of a mask too.
  virtual bool attends_for_all() const = 0;

  // [B, rows, H, ·] shards → what arrives here. Joint tokens, where there are any, are T more rows of every shard, in
  // front of the rank's own or behind, and T more tokens of every view, in front of the sequence or behind it.
  virtual Buffers exchange(const AttentionPlan& plan, const Qkv& qkv, const exchange::Group& group) const = 0;
  // q [B, Sq, h, D], k [B, Skv, h_kv, D], v [B, Skv, h_kv, D_v]: strided views of what arrived, or of the shards.
  virtual Qkv views(const AttentionPlan& plan, const Buffers& buffers, const Qkv& shards) const = 0;
  // Gradients of the views → gradients of the shards, complete, padding rows zero.
  virtual Qkv exchange_backward(const AttentionPlan& plan, const Qkv& grads, const exchange::Group& group) const = 0;

  // Local out [B, Sq, h, D_v] and lse [B, h, Sq] → shards out [B, rows, H, D_v] and, when asked for, lse [B, H, rows].
  virtual kernels::KernelOutput restore(const AttentionPlan& plan, const kernels::KernelOutput& local,
                                        const exchange::Group& group) const = 0;
  // Gradients of what restore returned → of the local out and lse. grad.lse is defined whenever plan.return_lse, on
  // every rank alike.
  virtual kernels::KernelOutput restore_backward(const AttentionPlan& plan, const kernels::KernelOutput& grad,
                                                 const exchange::Group& group) const = 0;

  // The rows of a shard of q or out that this rank's attention reads or made, in the order of LocalWork::q_positions.
  // Only where a rank attends for its own queries.
  virtual at::Tensor local_rows(const AttentionPlan& plan, const at::Tensor& shard) const = 0;

  // What backward reads besides the buffers: shards (by views()), and the local out where the returned out is not it.
  struct Needs {
    bool q, kv, local_out;
  };
  virtual Needs backward_needs() const = 0;
};

// The strategy that serves a plan: a group of one and replicated K/V need no communication whatever the name.
const Strategy& strategy_for(std::string_view name, const AttentionPlan& plan);

const Strategy& ulysses_strategy();
const Strategy& allgather_kv_strategy();
const Strategy& local_strategy();

// `rows` rows in `dim`, those behind the tensor's own of `fill`; the tensor itself if there are none to add.
at::Tensor pad_tokens(const at::Tensor& tensor, int64_t rows, int64_t dim = 1, double fill = 0.0);

// Local out and lse without padding rows → with them: out 0, lse −inf.
kernels::KernelOutput pad_rows(const kernels::KernelOutput& local, int64_t rows, bool with_lse);

}  // namespace ulysses::strategy
