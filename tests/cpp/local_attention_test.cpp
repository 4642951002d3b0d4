#include "ulysses/kernels/local_attention.h"

#include "reference_attention.h"
#include "ulysses/kernels/builtin_kernels.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

// Passes on to a kernel and keeps what it was handed.
class RecordingKernel final : public Kernel {
 public:
  explicit RecordingKernel(const Kernel& inner) : inner_(inner) {}
  std::string_view name() const override { return "recording"; }
  std::optional<std::string> refusal(const KernelNeed& need) const override { return inner_.refusal(need); }

  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    record(q, k, v, options);
    return inner_.forward(q, k, v, options);
  }
  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& grad_lse, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    record(q, k, v, options);
    return inner_.backward(grad_out, grad_lse, q, k, v, out, lse, options);
  }

  mutable int calls = 0;
  mutable at::Tensor last_q, last_k, last_v;

 private:
  void record(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const KernelOptions& options) const {
    ++calls;
    last_q = q, last_k = k, last_v = v;
    EXPECT_GT(q.numel(), 0);
    EXPECT_GT(k.numel(), 0);
    EXPECT_TRUE(!options.is_causal || q.size(1) == k.size(1));
  }
  const Kernel& inner_;
};

LocalAttentionOptions options_of(const AttentionCase& c) {
  return {c.is_causal, c.softmax_scale, c.q_begin, c.kv_begin};
}

AttentionResult run_local(const Kernel& kernel, const AttentionInputs& in, const AttentionCase& c) {
  const auto [out, lse] = local_attention(kernel, in.q, in.k, in.v, options_of(c));
  const KernelGrads grads =
      local_attention_backward(kernel, in.grad_out, {}, in.q, in.k, in.v, out, lse, options_of(c));
  return {out, lse, grads.dq, grads.dk, grads.dv};
}

AttentionCase at_positions(int64_t q_begin, int64_t q_len, int64_t kv_begin, int64_t kv_len) {
  AttentionCase c;
  c.q_begin = q_begin, c.q_len = q_len, c.kv_begin = kv_begin, c.kv_len = kv_len;
  c.is_causal = true;
  c.heads = 8, c.kv_heads = 2;
  return c;
}

// Every shape of cut: diagonal, full, none, queries amid all keys, keys amid queries, both kinds of overlap, one row.
const std::vector<AttentionCase>& causal_cases() {
  static const std::vector<AttentionCase> cases = {
      at_positions(5, 17, 5, 17), at_positions(40, 17, 3, 30), at_positions(0, 9, 9, 12),   at_positions(16, 16, 0, 64),
      at_positions(0, 40, 10, 7), at_positions(8, 30, 2, 19),  at_positions(2, 19, 8, 30),  at_positions(2, 30, 2, 11),
      at_positions(3, 1, 0, 7),   at_positions(0, 12, 11, 1),  at_positions(60, 70, 0, 257)};
  return cases;
}

TEST(LocalAttention, CausalOnGlobalPositionsMatchesFloat64) {
  for (const Kernel* kernel : {&fused_cpu_kernel(), &math_kernel()}) {
    for (const at::ScalarType dtype : float_dtypes()) {
      for (AttentionCase c : causal_cases()) {
        c.dtype = dtype;
        SCOPED_TRACE(std::string(kernel->name()) + " " + describe(c));
        const AttentionInputs in = random_inputs(c);
        const AttentionResult result = run_local(*kernel, in, c);
        expect_result(result, in, c);
        EXPECT_TRUE(result.out.is_contiguous());
        EXPECT_TRUE(result.lse.is_contiguous());
      }
    }
  }
}

TEST(LocalAttention, EveryPairOfSmallRangesMatchesFloat64) {
  for (int64_t q_begin = 0; q_begin < 5; ++q_begin) {
    for (int64_t kv_begin = 0; kv_begin < 5; ++kv_begin) {
      for (int64_t q_len = 0; q_len < 4; ++q_len) {
        for (int64_t kv_len = 0; kv_len < 4; ++kv_len) {
          AttentionCase c = at_positions(q_begin, q_len, kv_begin, kv_len);
          c.dtype = at::kDouble, c.batch = 1, c.heads = 2, c.kv_heads = 1, c.head_dim = c.v_head_dim = 4;
          SCOPED_TRACE(describe(c));
          const AttentionInputs in = random_inputs(c);
          expect_result(run_local(fused_cpu_kernel(), in, c), in, c);
        }
      }
    }
  }
}

TEST(LocalAttention, WithoutACutIsOneCallOnTheInputsWithTheKernelsBits) {
  AttentionCase full = at_positions(3, 12, 40, 31);
  full.is_causal = false;
  for (const AttentionCase& c : {full, at_positions(5, 17, 5, 17), at_positions(40, 8, 0, 40)}) {
    SCOPED_TRACE(describe(c));
    const AttentionInputs in = random_inputs(c);
    const RecordingKernel kernel(fused_cpu_kernel());
    const AttentionResult result = run_local(kernel, in, c);
    EXPECT_EQ(kernel.calls, 2);  // one forward, one backward
    EXPECT_TRUE(kernel.last_q.is_same(in.q) && kernel.last_k.is_same(in.k) && kernel.last_v.is_same(in.v));
    AttentionCase plain = c;
    plain.is_causal = c.is_causal && c.q_begin == c.kv_begin;
    const AttentionResult direct = run_kernel(fused_cpu_kernel(), in, plain, true);
    EXPECT_TRUE(at::equal(result.out, direct.out));
    EXPECT_TRUE(at::equal(result.lse, direct.lse));
    EXPECT_TRUE(at::equal(result.dv, direct.dv));
  }
}

TEST(LocalAttention, KeysAfterTheQueriesAreCutOffAsAView) {
  const AttentionCase c = at_positions(0, 8, 0, 20);
  const AttentionInputs in = random_inputs(c);
  const RecordingKernel kernel(fused_cpu_kernel());
  local_attention(kernel, in.q, in.k, in.v, options_of(c));
  EXPECT_EQ(kernel.calls, 1);
  EXPECT_EQ(kernel.last_k.size(1), 8);
  EXPECT_TRUE(kernel.last_k.is_alias_of(in.k));
}

TEST(LocalAttention, RowsOfOneBlockKeepTheKernelsBits) {
  AttentionCase c = at_positions(0, 20, 12, 8);  // rows 12..19 see keys, all in one square
  for (const at::ScalarType dtype : float_dtypes()) {
    c.dtype = dtype;
    SCOPED_TRACE(describe(c));
    const AttentionInputs in = random_inputs(c);
    const KernelOutput result = local_attention(fused_cpu_kernel(), in.q, in.k, in.v, options_of(c));
    const KernelOutput square = fused_cpu_kernel().forward(in.q.narrow(1, 12, 8), in.k, in.v, {true, c.softmax_scale});
    EXPECT_TRUE(at::equal(result.out.narrow(1, 12, 8), square.out));
    EXPECT_TRUE(at::equal(result.lse.narrow(2, 12, 8), square.lse));
  }
}

TEST(LocalAttention, EmptyInputsNeverReachTheKernel) {
  AttentionCase no_batch = at_positions(0, 4, 0, 4), no_heads = no_batch;
  no_batch.batch = 0;
  no_heads.heads = no_heads.kv_heads = 0;
  for (AttentionCase c : {no_batch, no_heads, at_positions(0, 0, 0, 4), at_positions(0, 4, 0, 0),
                          at_positions(0, 4, 4, 6), at_positions(0, 0, 0, 0)}) {
    for (const bool is_causal : {true, false}) {
      if (c.kv_begin == 4 && !is_causal) continue;
      c.is_causal = is_causal;
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = random_inputs(c);
      const RecordingKernel kernel(fused_cpu_kernel());
      const AttentionResult result = run_local(kernel, in, c);
      EXPECT_EQ(kernel.calls, 0);
      expect_result(result, in, c);
    }
  }
}

TEST(LocalAttention, TokenMajorViewsMatchContiguousInputs) {
  const AttentionCase c = at_positions(8, 30, 2, 19);
  const AttentionInputs in = random_inputs(c);
  const AttentionInputs views{token_major_view(in.q), token_major_view(in.k), token_major_view(in.v),
                              token_major_view(in.grad_out)};
  const AttentionResult result = run_local(fused_cpu_kernel(), views, c);
  EXPECT_TRUE(at::equal(result.out, run_local(fused_cpu_kernel(), in, c).out));
  expect_result(result, in, c);
}

// As a ring does it: the keys in shards, each with the out and lse of the whole.
TEST(LocalAttention, BackwardOverShardsOfTheKeysIsAdditive) {
  const AttentionCase whole = at_positions(10, 20, 0, 40);
  const AttentionInputs in = random_inputs(whole);
  const AttentionResult ref = reference_attention(in, whole);
  const at::Tensor out = ref.out.to(at::kFloat), lse = ref.lse.to(at::kFloat);
  at::Tensor dq = at::zeros_like(in.q);
  std::vector<at::Tensor> dk, dv;
  for (const auto& [begin, size] : {std::pair<int64_t, int64_t>{0, 13}, {13, 13}, {26, 14}}) {
    const KernelGrads part =
        local_attention_backward(fused_cpu_kernel(), in.grad_out, {}, in.q, in.k.narrow(1, begin, size),
                                 in.v.narrow(1, begin, size), out, lse, {true, whole.softmax_scale, 10, begin});
    dq += part.dq;
    dk.push_back(part.dk);
    dv.push_back(part.dv);
  }
  expect_close("dq", dq, ref.dq, tolerance(at::kFloat, ref.dq, {}));
  expect_close("dk", at::cat(dk, 1), ref.dk, tolerance(at::kFloat, ref.dk, {}));
  expect_close("dv", at::cat(dv, 1), ref.dv, tolerance(at::kFloat, ref.dv, {}));
}

TEST(LocalAttention, RowsThatSeeNoKeyGiveZeroGradientsAndNoNaN) {
  for (const Kernel* kernel : {&fused_cpu_kernel(), &math_kernel()}) {
    AttentionCase c = at_positions(0, 6, 0, 9);
    c.is_causal = false;
    const AttentionInputs in = random_inputs(c);
    auto [out, lse] = local_attention(*kernel, in.q, in.k, in.v, options_of(c));
    out.narrow(1, 4, 2).zero_();
    lse.narrow(2, 4, 2).fill_(-std::numeric_limits<double>::infinity());
    const KernelGrads grads =
        local_attention_backward(*kernel, in.grad_out, {}, in.q, in.k, in.v, out, lse, options_of(c));
    EXPECT_EQ(max_abs(grads.dq.narrow(1, 4, 2)), 0.0);
    AttentionCase rest = c;
    rest.q_len = 4;
    expect_result({out.narrow(1, 0, 4), lse.narrow(2, 0, 4), grads.dq.narrow(1, 0, 4), grads.dk, grads.dv},
                  {in.q.narrow(1, 0, 4), in.k, in.v, in.grad_out.narrow(1, 0, 4)}, rest);
  }
}

}  // namespace
}  // namespace ulysses::kernels
