#include <ATen/ops/tensor.h>

#include <array>

#include "masked_attention.h"
#include "ulysses/kernels/builtin_kernels.h"

// Softcap, sinks and the gradient through lse.
namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

std::vector<AttentionCase> cases_of(at::ScalarType dtype) {
  std::vector<AttentionCase> cases(4);
  cases[0].kv_len = 20, cases[0].heads = 4, cases[0].kv_heads = 2;
  cases[1].q_len = cases[1].kv_len = 17, cases[1].heads = 8, cases[1].kv_heads = 2, cases[1].is_causal = true;
  cases[2].q_begin = 8, cases[2].q_len = 30, cases[2].kv_begin = 2, cases[2].kv_len = 19, cases[2].is_causal = true;
  cases[3].q_len = 20, cases[3].kv_begin = 10, cases[3].heads = 4, cases[3].kv_heads = 1, cases[3].is_causal = true;
  for (AttentionCase& c : cases) c.dtype = dtype, c.head_dim = c.v_head_dim = 8;
  return cases;
}

// What to add to a plain call.
struct Extras {
  bool mask = false, sinks = false, grad_lse = false;
  double softcap = 0.0;
};

MaskedInputs inputs_with(const Extras& extras, const AttentionCase& c, at::ScalarType mask_dtype) {
  MaskedInputs in{random_inputs(c), {}, {}, {}, extras.softcap};
  if (extras.mask) in.mask = random_mask(mask_kinds()[5], c, mask_dtype);
  if (extras.sinks) in.sinks = random_tensor({c.heads}, at::kFloat, 7).to(c.dtype);
  if (extras.grad_lse)
    in.grad_lse = random_tensor({c.batch, c.heads, c.q_len}, c.dtype == at::kDouble ? at::kDouble : at::kFloat, 8);
  return in;
}

// Every case in every dtype, the scales in turn.
void check_extras(const Kernel& kernel, const Extras& extras) {
  constexpr std::array kScales = {0.8, -0.8, 0.0};
  size_t turn = 0;
  for (const at::ScalarType dtype : float_dtypes()) {
    for (AttentionCase c : cases_of(dtype)) {
      c.softmax_scale = kScales[turn++ % kScales.size()];
      for (const at::ScalarType mask_dtype : {at::kBool, dtype}) {
        if (!extras.mask && mask_dtype == at::kBool) continue;
        SCOPED_TRACE(std::string(kernel.name()) + " " + describe(c) + " scale=" + std::to_string(c.softmax_scale));
        const MaskedInputs in = inputs_with(extras, c, mask_dtype);
        const bool mask_needs_grad = extras.mask && mask_dtype != at::kBool && extras.softcap > 0.0;
        expect_masked_result(run_masked(kernel, in, c, mask_needs_grad), in, c);
      }
    }
  }
}

TEST(Softcap, MatchesFloat64) { check_extras(math_kernel(), {.softcap = 0.9}); }
TEST(Softcap, WithMaskSinksAndLseGradientMatchesFloat64) {
  check_extras(math_kernel(), {.mask = true, .softcap = 0.9});
  check_extras(math_kernel(), {.mask = true, .sinks = true, .grad_lse = true, .softcap = 0.9});
}

TEST(Softcap, TwoKeysByHand) {
  const auto column = [](std::vector<double> x) {
    return at::tensor(x, at::kDouble).view({1, static_cast<int64_t>(x.size()), 1, 1});
  };
  const double low = 2.0 * std::tanh(-0.5), high = 2.0 * std::tanh(1.5);
  const KernelOptions options{.softmax_scale = 0.5, .softcap = 2.0};
  const auto [out, lse] = math_kernel().forward(column({2.0}), column({3.0, -1.0}), column({10.0, 20.0}), options);
  const double p = 1.0 / (1.0 + std::exp(low - high));
  EXPECT_NEAR(lse.item<double>(), std::log(std::exp(low) + std::exp(high)), 1e-14);
  EXPECT_NEAR(out.item<double>(), 10.0 * p + 20.0 * (1.0 - p), 1e-13);
}

TEST(Softcap, IsRefusedByFusedKernelsSoThatAutoTakesMath) {
  KernelNeed need;
  need.head_dim = need.v_head_dim = 64;
  need.has_softcap = true;
  std::string why;
  EXPECT_EQ(select_kernel("auto", need, all_kernels(), &why), &math_kernel());
  EXPECT_EQ(select_kernel("cpu_fused", need, all_kernels(), &why), nullptr);
  EXPECT_EQ(why, "cpu_fused computes no softcap; math does");
}

TEST(Masks, AreTakenOnCpuAndRefusedByCudaKernels) {
  KernelNeed need;
  need.head_dim = need.v_head_dim = 64, need.dtype = "bfloat16", need.has_mask = true;
  std::string why;
  EXPECT_EQ(select_kernel("auto", need, all_kernels(), &why), &fused_cpu_kernel());
  need.device = "cuda";
  EXPECT_EQ(select_kernel("auto", need, all_kernels(), &why), &math_kernel());
  for (const char* name : {"cuda_flash", "cuda_efficient", "cuda_cudnn"}) {
    EXPECT_EQ(select_kernel(name, need, all_kernels(), &why), nullptr);
    EXPECT_EQ(why.find(std::string(name) + " takes no attn_mask; math does"), 0U) << why;
    KernelNeed softcap = need;
    softcap.has_mask = false, softcap.has_softcap = true;
    EXPECT_EQ(select_kernel(name, softcap, all_kernels(), &why), nullptr);
    EXPECT_EQ(why.find(std::string(name) + " takes no softcap; math does"), 0U) << why;
  }
}

TEST(Sinks, MatchFloat64WithEveryKernel) {
  for (const Kernel* kernel : {&fused_cpu_kernel(), &math_kernel()}) {
    check_extras(*kernel, {.sinks = true});
    check_extras(*kernel, {.mask = true, .sinks = true});
    check_extras(*kernel, {.mask = true, .sinks = true, .grad_lse = true});
  }
}

// q = k = 0 and v = 1: n visible keys of weight 1 beside a sink of weight e^s give n / (n + e^s).
TEST(Sinks, UniformScoresByHand) {
  for (const Kernel* kernel : {&fused_cpu_kernel(), &math_kernel()}) {
    for (const at::ScalarType dtype : float_dtypes()) {
      AttentionCase c;
      c.q_len = c.kv_len = 9, c.heads = 2, c.kv_heads = 1, c.dtype = dtype, c.is_causal = true;
      const double tol = dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 1e-5 : 2e-2;
      MaskedInputs in{random_inputs(c), {}, at::tensor({0.5, -1.5}, at::kDouble).to(dtype), {}};
      in.tensors.q.zero_();
      in.tensors.k.zero_();
      in.tensors.v.fill_(1.0);
      in.tensors.grad_out.fill_(1.0);
      const MaskedResult result = run_masked(*kernel, in, c);
      for (int64_t head = 0; head < 2; ++head) {
        const double s = std::exp(head == 0 ? 0.5 : -1.5);
        double slope = 0.0;
        for (int64_t i = 0; i < 9; ++i) {
          const double n = static_cast<double>(i + 1);
          EXPECT_LE(max_abs(result.plain.out.select(1, i).select(1, head) - n / (n + s)), tol) << i;
          EXPECT_LE(max_abs(result.plain.lse.select(1, head).select(1, i) - std::log(n + s)), std::min(tol, 1e-4)) << i;
          slope -= static_cast<double>(c.batch * c.v_head_dim) * n * s / ((n + s) * (n + s));
        }
        EXPECT_NEAR(result.dsinks[head].item<double>(), slope, tol * std::abs(slope));
      }
    }
  }
}

TEST(Sinks, RowsThatSeeNoKeyHaveTheSinkAlone) {
  AttentionCase c;
  c.heads = 4, c.kv_heads = 2;
  AttentionCase no_keys = c;
  no_keys.kv_len = 0;
  for (const Kernel* kernel : {&fused_cpu_kernel(), &math_kernel()}) {
    for (const AttentionCase& each : {c, no_keys}) {
      MaskedInputs in = inputs_with({.sinks = true, .grad_lse = true}, each, at::kBool);
      in.mask = at::zeros({1, 1, 1, each.kv_len}, at::kBool);
      const MaskedResult result = run_masked(*kernel, in, each);
      EXPECT_TRUE(at::equal(result.plain.lse, in.sinks.view({1, 4, 1}).expand_as(result.plain.lse)));
      for (const at::Tensor& x : {result.plain.out, result.plain.dq, result.plain.dk, result.plain.dv})
        EXPECT_EQ(max_abs(x), 0.0);
      expect_close("dsinks", result.dsinks, in.grad_lse.sum(at::IntArrayRef{0, 2}), 1e-5);
    }
  }
}

TEST(Sinks, OfMinusInfinityAreNone) {
  AttentionCase c;
  c.is_causal = true;
  c.q_len = 12, c.kv_begin = 5;  // rows without keys too
  MaskedInputs in{random_inputs(c), {}, at::full({c.heads}, kNoScore, at::kFloat), {}};
  const MaskedResult with = run_masked(fused_cpu_kernel(), in, c);
  in.sinks = at::Tensor();
  const MaskedResult without = run_masked(fused_cpu_kernel(), in, c);
  EXPECT_TRUE(at::equal(with.plain.out, without.plain.out));
  EXPECT_TRUE(at::equal(with.plain.lse, without.plain.lse));
  EXPECT_TRUE(at::equal(with.plain.dq, without.plain.dq));
  EXPECT_EQ(max_abs(with.dsinks), 0.0);
}

TEST(LseGradient, MatchesFloat64WithEveryKernel) {
  for (const Kernel* kernel : {&fused_cpu_kernel(), &math_kernel()}) {
    check_extras(*kernel, {.grad_lse = true});
    check_extras(*kernel, {.mask = true, .grad_lse = true});
  }
}

// Whatever arrives for a row that sees no key, NaN too, moves no input.
TEST(LseGradient, IsIgnoredOnRowsWithoutKeys) {
  for (AttentionCase c : cases_of(at::kDouble)) {
    for (const bool sinks : {false, true}) {
      SCOPED_TRACE(describe(c));
      MaskedInputs in = inputs_with({.mask = true, .sinks = sinks, .grad_lse = true}, c, at::kBool);
      if (sinks) in.sinks.select(0, 0).fill_(kNoScore);
      const at::Tensor nothing = reference_masked_attention(in, c).plain.lse.isneginf();
      ASSERT_TRUE(nothing.any().item<bool>());
      in.grad_lse.masked_fill_(nothing, std::numeric_limits<double>::quiet_NaN());
      expect_masked_result(run_masked(fused_cpu_kernel(), in, c), in, c);
    }
  }
}

}  // namespace
}  // namespace ulysses::kernels
