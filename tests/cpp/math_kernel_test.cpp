
#include "reference_attention.h"
#include "ulysses/kernels/builtin_kernels.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

TEST(MathKernel, MatchesFloat64ForEveryDtypeHeadCountAndLength) { check_kernel_grid(math_kernel()); }

TEST(MathKernel, ValueHeadDimMayDiffer) {
  for (const at::ScalarType dtype : float_dtypes()) {
    for (const int64_t v_head_dim : {1, 5, 40}) {
      AttentionCase c;
      c.q_len = c.kv_len = 33, c.heads = 6, c.kv_heads = 2, c.v_head_dim = v_head_dim, c.dtype = dtype;
      c.is_causal = true;
      check_kernel(math_kernel(), c);
    }
  }
}

TEST(MathKernel, UniformScoresGiveTheMean) {
  for (const at::ScalarType dtype : float_dtypes()) {
    check_uniform_probe(math_kernel(), dtype, false);
    check_uniform_probe(math_kernel(), dtype, true);
  }
}

TEST(MathKernel, StridedViewsGiveTheValuesOfContiguousInputs) {
  AttentionCase c;
  c.q_len = c.kv_len = 20, c.heads = 4, c.kv_heads = 2, c.is_causal = true;
  const AttentionInputs in = random_inputs(c);
  const AttentionInputs views{token_major_view(in.q), token_major_view(in.k), token_major_view(in.v),
                              token_major_view(in.grad_out)};
  ASSERT_FALSE(views.k.is_contiguous());
  expect_result(run_kernel(math_kernel(), views, c, true), in, c);
}

TEST(MathKernel, OutAndLseAreContiguous) {
  AttentionCase c;
  c.heads = 4, c.kv_heads = 2;
  const AttentionInputs in = random_inputs(c);
  const auto [out, lse] = math_kernel().forward(in.q, in.k, in.v, {});
  EXPECT_TRUE(out.is_contiguous());
  EXPECT_TRUE(lse.is_contiguous());
}

TEST(MathKernel, RowsWithoutKeysGiveZeroMinusInfinityAndZeroGradients) {
  AttentionCase c;
  c.kv_len = 0;
  check_kernel(math_kernel(), c);
}

TEST(MathKernel, LseOfMinusInfinityGivesZeroGradients) {
  AttentionCase c;
  const AttentionInputs in = random_inputs(c);
  auto [out, lse] = math_kernel().forward(in.q, in.k, in.v, {false, c.softmax_scale});
  lse.fill_(-std::numeric_limits<double>::infinity());
  const KernelGrads grads =
      math_kernel().backward(in.grad_out, {}, in.q, in.k, in.v, at::zeros_like(out), lse, {false, c.softmax_scale});
  for (const at::Tensor& grad : {grads.dq, grads.dk, grads.dv}) EXPECT_TRUE(at::equal(grad, at::zeros_like(grad)));
}

}  // namespace
}  // namespace ulysses::kernels
