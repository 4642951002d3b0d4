#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>

#include "reference_attention.h"
#include "ulysses/kernels/builtin_kernels.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

AttentionInputs as_views(const AttentionInputs& in) {
  return {token_major_view(in.q), token_major_view(in.k), token_major_view(in.v), token_major_view(in.grad_out)};
}

void expect_same_bits(const AttentionResult& a, const AttentionResult& b) {
  EXPECT_TRUE(at::equal(a.out, b.out)) << "out";
  EXPECT_TRUE(at::equal(a.lse, b.lse)) << "lse";
  if (!a.dq.defined()) return;
  EXPECT_TRUE(at::equal(a.dq, b.dq)) << "dq";
  EXPECT_TRUE(at::equal(a.dk, b.dk)) << "dk";
  EXPECT_TRUE(at::equal(a.dv, b.dv)) << "dv";
}

TEST(FusedCpuKernel, MatchesFloat64ForEveryDtypeHeadCountAndLength) { check_kernel_grid(fused_cpu_kernel()); }

TEST(FusedCpuKernel, HeadDimsFromOneToLarge) {
  for (const int64_t head_dim : {1, 3, 72, 512, 600}) {
    AttentionCase c;
    c.q_len = c.kv_len = 33, c.head_dim = c.v_head_dim = head_dim, c.softmax_scale = 0.05, c.is_causal = true;
    check_kernel(fused_cpu_kernel(), c);
  }
}

TEST(FusedCpuKernel, UniformScoresGiveTheMean) {
  for (const at::ScalarType dtype : float_dtypes()) {
    check_uniform_probe(fused_cpu_kernel(), dtype, false);
    check_uniform_probe(fused_cpu_kernel(), dtype, true);
  }
}

TEST(FusedCpuKernel, HeadSubsetIsTheSliceOfTheWholeBitForBit) {
  for (const at::ScalarType dtype : float_dtypes()) {
    for (const int64_t len : {1, 7, 64, 257}) {
      AttentionCase c;
      c.q_len = c.kv_len = len, c.heads = 8, c.kv_heads = 2, c.dtype = dtype, c.is_causal = true;
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = random_inputs(c);
      const KernelOutput whole = fused_cpu_kernel().forward(in.q, in.k, in.v, {true, c.softmax_scale});
      for (const auto& [begin, size] : {std::pair<int64_t, int64_t>{0, 4}, {4, 4}, {2, 1}, {5, 2}}) {
        const int64_t kv_head = begin / 4;
        const KernelOutput part = fused_cpu_kernel().forward(in.q.narrow(2, begin, size), in.k.narrow(2, kv_head, 1),
                                                             in.v.narrow(2, kv_head, 1), {true, c.softmax_scale});
        EXPECT_TRUE(at::equal(part.out, whole.out.narrow(2, begin, size)));
        EXPECT_TRUE(at::equal(part.lse, whole.lse.narrow(1, begin, size)));
      }
    }
  }
}

TEST(FusedCpuKernel, TokenMajorViewsGiveTheBitsOfContiguousInputs) {
  for (const at::ScalarType dtype : float_dtypes()) {
    for (const int64_t len : {1, 7, 257}) {
      AttentionCase c;
      c.q_len = c.kv_len = len, c.dtype = dtype, c.is_causal = true;
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = random_inputs(c);
      const bool backward = dtype != at::kHalf || len <= 64;
      expect_same_bits(run_kernel(fused_cpu_kernel(), as_views(in), c, backward),
                       run_kernel(fused_cpu_kernel(), in, c, backward));
    }
  }
}

// From 1024 keys on the kernel copies K and V head-major: against the op itself on the views, without any copy.
TEST(FusedCpuKernel, CopyingKeysAndValuesLeavesTheBits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t len : {1023, 1024, 1100}) {
      AttentionCase c;
      c.batch = 1, c.q_len = 40, c.kv_len = len, c.heads = 4, c.kv_heads = 2, c.dtype = dtype;
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = as_views(random_inputs(c));
      const auto heads = [](const at::Tensor& x) { return x.transpose(1, 2); };
      const auto [op_out, op_lse] = at::_scaled_dot_product_flash_attention_for_cpu(
          heads(in.q), heads(in.k), heads(in.v), 0.0, false, {}, c.softmax_scale);
      const AttentionResult result = run_kernel(fused_cpu_kernel(), in, c, true);
      EXPECT_TRUE(at::equal(result.out, heads(op_out)));
      EXPECT_TRUE(at::equal(result.lse, op_lse));
      expect_result(result, in, c);
    }
  }
}

TEST(FusedCpuKernel, OutKeepsTheMemoryOrderOfQ) {
  AttentionCase c;
  const AttentionInputs in = random_inputs(c);
  EXPECT_TRUE(fused_cpu_kernel().forward(in.q, in.k, in.v, {}).out.is_contiguous());
  const at::Tensor out = fused_cpu_kernel().forward(token_major_view(in.q), in.k, in.v, {}).out;
  EXPECT_TRUE(out.transpose(0, 1).is_contiguous());  // [S, B, h, D] in memory
}

// The op's traps, one test each.

TEST(FusedCpuKernel, LastDimStrideOtherThanOne) {
  for (const at::ScalarType dtype : float_dtypes()) {
    AttentionCase c;
    c.q_len = c.kv_len = 12, c.dtype = dtype;
    SCOPED_TRACE(describe(c));
    const AttentionInputs in = random_inputs(c);
    const auto every_second = [](const at::Tensor& x) {
      at::Tensor wide = at::full({x.size(0), x.size(1), x.size(2), 2 * x.size(3)}, 1e4, x.options());
      at::Tensor view = wide.slice(3, 0, std::nullopt, 2);
      view.copy_(x);
      return view;
    };
    expect_same_bits(
        run_kernel(fused_cpu_kernel(),
                   {every_second(in.q), every_second(in.k), every_second(in.v), every_second(in.grad_out)}, c, true),
        run_kernel(fused_cpu_kernel(), in, c, true));
  }
}

TEST(FusedCpuKernel, ExpandedGradOutOfASum) {
  for (const at::ScalarType dtype : float_dtypes()) {
    AttentionCase c;
    c.dtype = dtype;
    SCOPED_TRACE(describe(c));
    AttentionInputs in = random_inputs(c);
    in.grad_out = at::full({}, 1.0, in.q.options()).expand(in.q.sizes());
    AttentionInputs dense = in;
    dense.grad_out = in.grad_out.contiguous();
    expect_same_bits(run_kernel(fused_cpu_kernel(), in, c, true), run_kernel(fused_cpu_kernel(), dense, c, true));
  }
}

TEST(FusedCpuKernel, RowsThatRepeatOrOverlapInMemory) {
  for (const at::ScalarType dtype : float_dtypes()) {
    AttentionCase c;
    c.batch = 1, c.q_len = c.kv_len = 20, c.dtype = dtype;
    SCOPED_TRACE(describe(c));
    const AttentionInputs in = random_inputs(c);
    const at::Tensor repeated = in.k.narrow(1, 0, 1).expand(in.k.sizes());
    const at::Tensor overlapping = in.v.as_strided(in.v.sizes(), {0, 5, 20 * 16, 1});
    const AttentionInputs tricky{in.q.narrow(1, 0, 1).expand(in.q.sizes()), repeated, overlapping,
                                 in.grad_out.narrow(1, 0, 1).expand(in.q.sizes())};
    const AttentionInputs dense{tricky.q.contiguous(), repeated.contiguous(), overlapping.contiguous(),
                                tricky.grad_out.contiguous()};
    expect_same_bits(run_kernel(fused_cpu_kernel(), tricky, c, true), run_kernel(fused_cpu_kernel(), dense, c, true));
  }
}

TEST(FusedCpuKernel, OneRowWithAnyStride) {
  for (const at::ScalarType dtype : float_dtypes()) {
    AttentionCase c;
    c.q_len = c.kv_len = 1, c.dtype = dtype;
    SCOPED_TRACE(describe(c));
    const AttentionInputs in = random_inputs(c);
    const auto odd = [](const at::Tensor& x) {
      return x.as_strided(x.sizes(), {x.stride(0), /*rows=*/0, x.stride(2), 1});
    };
    expect_same_bits(run_kernel(fused_cpu_kernel(), {odd(in.q), odd(in.k), odd(in.v), odd(in.grad_out)}, c, true),
                     run_kernel(fused_cpu_kernel(), in, c, true));
  }
}

TEST(FusedCpuKernel, EmptyInputsAreAnsweredAndNeverReachTheOp) {
  AttentionCase no_batch, no_queries, no_keys, no_heads;
  no_batch.batch = 0;
  no_queries.q_len = 0;
  no_keys.kv_len = 0;
  no_heads.heads = no_heads.kv_heads = 0;
  for (const AttentionCase& c : {no_batch, no_queries, no_keys, no_heads}) check_kernel(fused_cpu_kernel(), c);
}

TEST(FusedCpuKernel, LseOfMinusInfinityGivesZeroGradientsForThatRowOnly) {
  for (const at::ScalarType dtype : float_dtypes()) {
    AttentionCase c;
    c.q_len = 6, c.kv_len = 9, c.dtype = dtype;
    SCOPED_TRACE(describe(c));
    const AttentionInputs in = random_inputs(c);
    const KernelOptions options{false, c.softmax_scale};
    auto [out, lse] = fused_cpu_kernel().forward(in.q, in.k, in.v, options);
    out.narrow(1, 0, 2).zero_();
    lse.narrow(2, 0, 2).fill_(-std::numeric_limits<double>::infinity());
    const KernelGrads grads = fused_cpu_kernel().backward(in.grad_out, {}, in.q, in.k, in.v, out, lse, options);

    AttentionCase rest = c;
    rest.q_len = 4;
    const AttentionInputs rest_in{in.q.narrow(1, 2, 4), in.k, in.v, in.grad_out.narrow(1, 2, 4)};
    EXPECT_EQ(max_abs(grads.dq.narrow(1, 0, 2)), 0.0);
    expect_result({out.narrow(1, 2, 4), lse.narrow(2, 2, 4), grads.dq.narrow(1, 2, 4), grads.dk, grads.dv}, rest_in,
                  rest);
  }
}

TEST(FusedCpuKernel, RefusesWhatTheOpCannotDo) {
  KernelNeed need;
  need.head_dim = need.v_head_dim = 64;
  EXPECT_EQ(fused_cpu_kernel().refusal(need), std::nullopt);
  need.v_head_dim = 32;
  EXPECT_NE(fused_cpu_kernel().refusal(need), std::nullopt);
  need.v_head_dim = 64, need.dtype = "float8_e4m3fn";
  EXPECT_NE(fused_cpu_kernel().refusal(need), std::nullopt);
  need.dtype = "float32", need.device = "cuda";
  EXPECT_NE(fused_cpu_kernel().refusal(need), std::nullopt);
}

}  // namespace
}  // namespace ulysses::kernels
