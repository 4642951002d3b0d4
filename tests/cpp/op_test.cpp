// The torch op as a C++ program calls it, through the dispatcher.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include "plain_processor.h"

namespace ulysses::testing {
namespace {

using contract::AttentionOptions;
using exchange::Group;

std::pair<at::Tensor, at::Tensor> torch_op(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const Group& group, const AttentionOptions& options) {
  const c10::IValue none;  // attn_mask, sinks
  std::vector<c10::IValue> stack = {q, k, v, none, none, group.name(), group.size(), group.rank()};
  for (const auto& layout : {options.layout, options.kv_layout}) {
    stack.emplace_back(layout ? layout->lengths : std::vector<int64_t>{});
    stack.emplace_back(layout ? layout->padded_lengths : std::vector<int64_t>{});
  }
  stack.emplace_back(options.is_causal);
  stack.emplace_back(options.softmax_scale);
  stack.emplace_back(options.return_lse);
  stack.emplace_back("strategy=" + options.strategy);
  c10::Dispatcher::singleton().findSchemaOrThrow("ulysses::attention", "").callBoxed(stack);
  return {stack[0].toTensor(), stack[1].toTensor()};
}

void expect_equal(const AttentionResult& a, const AttentionResult& b) {
  EXPECT_TRUE(at::equal(a.out, b.out));
  EXPECT_TRUE(at::equal(a.lse, b.lse));
  EXPECT_TRUE(at::equal(a.dq, b.dq));
  EXPECT_TRUE(at::equal(a.dk, b.dk));
  EXPECT_TRUE(at::equal(a.dv, b.dv));
}

class TorchOp : public EveryStrategyAndSize {};
INSTANTIATE_TEST_SUITE_P(Calls, TorchOp,
                         ::testing::Combine(::testing::Values("ulysses", "allgather_kv"), ::testing::Values(1, 2, 4)));

TEST_P(TorchOp, TheTorchOpCalledFromCppMatchesTheReference) {
  for (const bool is_causal : {false, true}) {
    ShardedCase c = sharded(21, 12, 3);
    c.attention.is_causal = is_causal;
    check_sharded(c, torch_op);
  }
  check_sharded(sharded(2, 2, 1), torch_op);
}

TEST_P(TorchOp, TheTorchOpAndTheProcessorGiveTheSameBits) {
  ShardedCase c = sharded(21, 12, 3);
  c.options.return_lse = true;
  c.attention.is_causal = true;
  const AttentionInputs in = random_inputs(c.attention);
  expect_equal(run_sharded(c, in, torch_op), run_sharded(c, in));
}

}  // namespace
}  // namespace ulysses::testing
