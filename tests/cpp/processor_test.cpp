// The template method, and backends of other authors.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "collectives.h"
#include "plain_processor.h"
#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/local_attention.h"
#include "ulysses/processors/attention_processor.h"
#include "ulysses/transports/recording/recording_group.h"
#include "ulysses/ulysses.h"

namespace ulysses::processors {
namespace {

using namespace ulysses::testing;
using contract::AttentionOptions;
using exchange::Group;
using kernels::KernelOutput;
using partition::SequenceLayout;
using transports::Recorder;

class AnyProcessor : public EveryStrategyAndSize {};
INSTANTIATE_TEST_SUITE_P(Calls, AnyProcessor,
                         ::testing::Combine(::testing::Values("ulysses", "allgather_kv"), ::testing::Values(1, 2, 4)));

TEST_P(AnyProcessor, ASubclassTrainsWithoutABackwardOfItsOwn) {
  const Registered plain("plain", std::make_shared<PlainProcessor>());
  for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{6, 6}, {12, 3}, {2, 1}}) {
    ShardedCase c = sharded(21, heads, kv_heads);
    c.options.policy.backend_name = "plain";
    c.attention.is_causal = heads != 6;
    c.attention.dtype = at::kDouble;
    check_sharded(c);
  }
  ShardedCase c = sharded(3, 2, 1);  // ranks without tokens
  c.options.policy.backend_name = "plain";
  check_sharded(c);
}

TEST_P(AnyProcessor, OneCollectiveInAndOneOutForwardAndBackward) {
  const auto& [strategy, world] = GetParam();
  const size_t expected = world == 1 ? 0 : strategy == "ulysses" ? 2 : 1;
  AttentionOptions options;
  options.strategy = strategy;
  options.agreement = "off";
  run_ranks(world, [&](int64_t, const Group& group) {
    const auto recorder = std::make_shared<Recorder>();
    const Group recorded(transports::record_group(group.process_group(), recorder));
    const at::Tensor x = at::ones({1, 3, 6, 8}).requires_grad_(true);
    const at::Tensor out = ulysses_attention(x, x, x, recorded, options).out;
    EXPECT_EQ(recorder->records().size(), expected);
    out.sum().backward();
    EXPECT_EQ(recorder->records().size(), 2 * expected);
  });
}

// As run_ranks, for a call on each rank whose error is looked for; every rank must get one with the id.
std::string error_on_every_rank(int64_t world, const std::string& id, const std::function<void(const Group&)>& call) {
  std::vector<std::string> texts(static_cast<size_t>(world));
  ulysses::run_ranks(world, [&](int64_t rank, const Group& group) {
    texts[static_cast<size_t>(rank)] = error_of([&] { call(group); }, id);
    EXPECT_EQ(group.gather_numbers({rank}).size(), static_cast<size_t>(world));  // usable afterwards
  });
  for (const std::string& text : texts) EXPECT_TRUE(contains(text, "[" + id + "]")) << text;
  return texts[0];
}

AttentionOptions with_backend(const std::string& name) {
  AttentionOptions options;
  options.policy.backend_name = name;
  return options;
}

at::Tensor ones(int64_t heads = 4) { return at::ones({1, 8, heads, 8}); }

TEST(Processor, UnknownBackendIsRefusedOnEveryRankCP001) {
  const auto text = error_on_every_rank(
      2, "CP001", [](const Group& group) { ulysses_attention(ones(), ones(), ones(), group, with_backend("ulises")); });
  EXPECT_TRUE(contains(text, "ulysses")) << text;
}

TEST(Processor, UndefinedTensorsAreRefusedCP020) {
  error_on_every_rank(2, "CP020",
                      [](const Group& group) { ulysses_attention(ones(), at::Tensor(), at::Tensor(), group); });
}

TEST(Processor, AFieldThatTheBackendDoesNotDeclareIsRefusedBeforeTheExchangeCP050) {
  struct Modest : PlainProcessor {
    std::vector<std::string> supports() const override { return {}; }
    KernelOutput attend(const at::Tensor&, const at::Tensor&, const at::Tensor&, const AttendCall&) override {
      ADD_FAILURE() << "attend() was reached";
      return {};
    }
  };
  const Registered modest("modest", std::make_shared<Modest>());
  for (const bool is_causal : {true, false}) {
    AttentionOptions options = with_backend("modest");
    options.is_causal = is_causal;
    if (!is_causal) options.kernel = "math";  // a backend that attends by its own code
    error_on_every_rank(2, "CP050",
                        [&](const Group& group) { ulysses_attention(ones(), ones(), ones(), group, options); });
  }
}

TEST(Processor, OneRankWithAnotherHeadCountIsNamedOnEveryRankCP060) {
  const auto text = error_on_every_rank(3, "CP060", [](const Group& group) {
    const at::Tensor x = ones(group.rank() == 1 ? 6 : 4);
    ulysses_attention(x, x, x, group);
  });
  EXPECT_TRUE(contains(text, "rank 1")) << text;
}

TEST(Processor, ASecondDerivativeIsRefusedCP065) {
  const Registered plain("plain", std::make_shared<PlainProcessor>());
  for (const char* name : {"ulysses", "plain"}) {
    error_on_every_rank(2, "CP065", [&](const Group& group) {
      const at::Tensor x = ones().requires_grad_(true);
      const at::Tensor out = ulysses_attention(x, x, x, group, with_backend(name)).out;
      torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    });
  }
}

// Returns what `change` makes of the right answer.
class Changed : public PlainProcessor {
 public:
  explicit Changed(std::function<KernelOutput(KernelOutput)> change) : change_(std::move(change)) {}
  KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttendCall& call) override {
    return change_(plain_attention(q, k, v, call));
  }

 private:
  std::function<KernelOutput(KernelOutput)> change_;
};

TEST(Processor, AWrongShapeOrDtypeFromAttendIsRefusedCP052) {
  const std::vector<std::pair<std::string, std::function<KernelOutput(KernelOutput)>>> changes = {
      {"[1, 4, 16, 8]",
       [](KernelOutput r) {
         return KernelOutput{r.out.transpose(1, 2), r.lse};
       }},
      {"[1, 16, 32]",
       [](KernelOutput r) {
         return KernelOutput{r.out.flatten(2), r.lse};
       }},
      {"out float64",
       [](KernelOutput r) {
         return KernelOutput{r.out.to(at::kDouble), r.lse};
       }},
      {"out nothing", [](KernelOutput) { return KernelOutput{}; }},
      {"lse nothing",
       [](KernelOutput r) {
         return KernelOutput{r.out, {}};
       }},
      {"lse float32 [1, 16, 4]",
       [](KernelOutput r) {
         return KernelOutput{r.out, r.lse.transpose(1, 2)};
       }},
  };
  for (const auto& [words, change] : changes) {
    const Registered changed("changed", std::make_shared<Changed>(change));
    AttentionOptions options = with_backend("changed");
    options.return_lse = true;
    const auto text = error_on_every_rank(
        2, "CP052", [&](const Group& group) { ulysses_attention(ones(8), ones(8), ones(8), group, options); });
    EXPECT_TRUE(contains(text, words)) << text;
    EXPECT_TRUE(contains(text, "16, 4, 8]") || contains(text, "[1, 4, 16]")) << text;  // the shape that is right
  }
}

// The ranks without heads must send the same number of bytes for a row of lse as the others.
TEST(Processor, AnLseInSixteenBitComesBackInFloat32) {
  const Registered changed("changed", std::make_shared<Changed>([](KernelOutput r) {
                             return KernelOutput{r.out.to(at::kBFloat16), r.lse.to(at::kBFloat16)};
                           }));
  AttentionOptions options = with_backend("changed");
  options.return_lse = true;
  run_ranks(3, [&](int64_t, const Group& group) {
    const at::Tensor zeros = at::zeros({1, 4, 2, 8}, at::kBFloat16);
    const at::Tensor lse = ulysses_attention(zeros, zeros, zeros, group, options).lse;
    ASSERT_EQ(lse.scalar_type(), at::kFloat);
    EXPECT_LE(max_abs(lse - std::log(12.0)), 1e-2);
  });
}

TEST(Processor, AnOutputRestoredAlongTheWrongDimensionIsRefusedCP052) {
  struct Sideways : PlainProcessor {
    processors::AttentionResult restore(const strategy::AttentionPlan& plan, const strategy::Strategy& strategy,
                                        const KernelOutput& local, const Group& group) override {
      const auto [out, lse] = UlyssesAttentionProcessor::restore(plan, strategy, local, group);
      return {out.transpose(1, 2).contiguous(), lse};
    }
  };
  const Registered sideways("sideways", std::make_shared<Sideways>());
  const auto text = error_on_every_rank(2, "CP052", [](const Group& group) {
    ulysses_attention(ones(), ones(), ones(), group, with_backend("sideways"));
  });
  EXPECT_TRUE(contains(text, "output_restore_dim") && contains(text, "[1, 8, 4, 8]")) << text;
}

// Brings its own exchange; `change` says what attend() gets of K and V.
class OwnExchange : public PlainProcessor {
 public:
  using Change = std::function<strategy::Qkv(const strategy::Qkv& right, const strategy::Qkv& shards)>;
  explicit OwnExchange(Change change) : change_(std::move(change)) {}
  bool overrides_exchange() const override { return true; }

 protected:
  Exchanged exchange(const strategy::AttentionPlan& plan, const strategy::Strategy& strategy, const strategy::Qkv& qkv,
                     const Group& group) override {
    const Exchanged right = UlyssesAttentionProcessor::exchange(plan, strategy, qkv, group);
    return {change_(right.views, qkv), right.buffers};
  }

 private:
  Change change_;
};

AttentionOptions gathered(const std::string& name) {
  AttentionOptions options = with_backend(name);
  options.strategy = "allgather_kv";
  return options;
}

TEST(Processor, AnExchangeOfItsOwnThatIsRightPasses) {
  const Registered own("own", std::make_shared<OwnExchange>([](const auto& right, const auto&) { return right; }));
  for (const char* strategy : {"ulysses", "allgather_kv"}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      ShardedCase c = case_of(21, 4, 6, 3);
      c.attention.dtype = dtype;
      c.options.policy.backend_name = "own";
      c.options.strategy = strategy;
      check_sharded(c);
    }
  }
}

TEST(Processor, KeysThatAreNotTheGroupsAreRefusedByContentCP053) {
  const auto own_repeated = [](const at::Tensor& shard) { return at::cat({shard, shard}, 1); };
  const std::vector<std::pair<std::string, OwnExchange::Change>> faults = {
      {"of K (head 0) are not what rank 1 holds",  // the right shape, the rank's own tokens W times
       [=](const auto& right, const auto& shards) {
         return strategy::Qkv{right.q, own_repeated(shards.k), own_repeated(shards.v)};
       }},
      {"of V (head 0) are not what rank 0 holds",
       [](const auto& right, const auto&) {
         return strategy::Qkv{right.q, right.k, right.v.flip(1)};
       }},
      {"covers 8 and its V 8 of 16 tokens",
       [](const auto& right, const auto& shards) {
         return strategy::Qkv{right.q, shards.k, shards.v};
       }},
      {"K has 4 and its V 3 heads",
       [](const auto& right, const auto&) {
         return strategy::Qkv{right.q, right.k, right.v.narrow(2, 0, 3)};
       }},
      {"instead of [B, S_global, h_kv, D]",
       [](const auto& right, const auto&) {
         return strategy::Qkv{right.q, right.k.flatten(2), right.v};
       }},
  };
  for (const auto& [words, change] : faults) {
    const Registered own("own", std::make_shared<OwnExchange>(change));
    const auto text = error_on_every_rank(2, "CP053", [](const Group& group) {
      const at::Tensor x = random_tensor({1, 8, 4, 8}, at::kFloat, static_cast<uint64_t>(group.rank() + 1));
      ulysses_attention(x, x, x, group, gathered("own"));
    });
    EXPECT_TRUE(contains(text, words)) << text;
  }
}

TEST(Processor, AFaultOfOneRankIsRefusedOnEveryRankCP053) {
  const Registered own("own", std::make_shared<OwnExchange>([](const auto& right, const auto& shards) {
                         // Only where the first value says so: rank 1.
                         const bool mine = shards.k.flatten()[0].template item<float>() == 1.0F;
                         return mine ? strategy::Qkv{right.q, right.k.add(1.0), right.v} : right;
                       }));
  error_on_every_rank(3, "CP053", [](const Group& group) {
    const at::Tensor x = at::full({1, 8, 3, 8}, static_cast<double>(group.rank()), at::kFloat);
    ulysses_attention(x, x, x, group, gathered("own"));
  });
}

// What the fused kernel wrote for one batch goes out from where it lies: no pass over memory between them.
TEST(Processor, OutOfBatchOneIsSentWithoutACopy) {
  static thread_local const void* out;
  struct Noting : PlainProcessor {
    KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttendCall&) override {
      const KernelOutput result = kernels::local_attention(kernels::fused_cpu_kernel(), q, k, v, {false, 1.0});
      out = result.out.const_data_ptr();
      return result;
    }
  };
  const Registered noting("noting", std::make_shared<Noting>());
  run_ranks(2, [](int64_t, const Group& group) {
    std::vector<const void*> sent;
    const Group noted(note_sent_buffers(group.process_group(), sent));
    AttentionOptions options = with_backend("noting");
    options.agreement = "off";
    ulysses_attention(ones(), ones(), ones(), noted, options);
    ASSERT_EQ(sent.size(), 2U);
    EXPECT_NE(sent[0], nullptr);
    EXPECT_EQ(sent[1], out);
  });
}

TEST(Shard, RowsOfTheRankWithZerosBehindAndTheirGradient) {
  const SequenceLayout layout(5, 2);  // 8 rows a rank: 5 and 3 of padding, then only padding
  const at::Tensor x = random_tensor({2, 3, 5}, at::kDouble, 1).requires_grad_(true);
  for (const int64_t dim : {2, -1}) {
    const at::Tensor rows = shard(x, layout, 0, dim);
    EXPECT_EQ(rows.sizes(), (std::vector<int64_t>{2, 3, 8}));
    EXPECT_TRUE(at::equal(rows.narrow(2, 0, 5), x));
    EXPECT_EQ(max_abs(rows.narrow(2, 5, 3)), 0.0);
    EXPECT_EQ(max_abs(shard(x, layout, 1, dim)), 0.0);
  }
  shard(x, layout, 0, 2).sum().backward();
  EXPECT_TRUE(x.grad().eq(1.0).all().item<bool>());
  EXPECT_TRUE(contains(error_of([&] { shard(x, layout, 0, 1); }, "CP012"), "not seq_len=5 long in dim=1"));
  EXPECT_FALSE(error_of([&] { shard(x, layout, 2, 2); }, "CP015").empty());
}

}  // namespace
}  // namespace ulysses::processors
