#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>

#include "cpu_flash.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

AttentionCase case_of(at::ScalarType dtype, int64_t q_len, int64_t kv_len, int64_t head_dim = 16) {
  AttentionCase c;
  c.dtype = dtype, c.q_len = q_len, c.kv_len = kv_len, c.head_dim = c.v_head_dim = head_dim;
  return c;
}

// Lengths around every size that the kernel cuts at: 8 and 16 keys, tiles of 16, 32 and 48 queries, blocks of 128 and
// 256 keys, ranges of 512.
TEST(CpuFlash, MatchesFloat64OverShapesMasksScalesAndDtypes) {
  const std::vector<std::pair<int64_t, int64_t>> lengths = {{1, 1},  {1, 17},  {7, 3},    {16, 16},   {33, 70},
                                                            {48, 8}, {49, 64}, {64, 129}, {100, 257}, {65, 1030}};
  const std::vector<std::pair<int64_t, int64_t>> heads = {{2, 2}, {4, 2}, {3, 1}};
  const std::vector<double> scales = {0.25, -0.3, 0.0, 0.6};
  const std::vector<int64_t> head_dims = {16, 48, 64, 80};
  size_t turn = 0;
  for (const at::ScalarType dtype : flash_dtypes()) {
    for (const auto& [q_len, kv_len] : lengths) {
      // No mask, the two usual diagonals, queries before all keys or amid them, queries behind all keys.
      const std::vector<std::optional<int64_t>> offsets = {std::nullopt, 0, kv_len - q_len, -5, 3, kv_len};
      for (const std::optional<int64_t>& offset : offsets) {
        AttentionCase c = case_of(dtype, q_len, kv_len, head_dims[turn % head_dims.size()]);
        c.batch = 1 + static_cast<int64_t>(turn % 2);
        std::tie(c.heads, c.kv_heads) = heads[turn % heads.size()];
        c.softmax_scale = scales[turn % 7 % scales.size()];
        c.is_causal = offset.has_value();
        c.q_begin = 5 + offset.value_or(0), c.kv_begin = 5;
        ++turn;
        SCOPED_TRACE(describe(c) + " scale=" + std::to_string(c.softmax_scale));
        const AttentionInputs in = random_inputs(c, turn);
        expect_near_float64(attend_both_ways(in, c), in, c);
      }
    }
  }
}

TEST(CpuFlash, EveryHeadDimThatItTakes) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    for (int64_t head_dim = 16; head_dim <= 256; head_dim += 16) {
      AttentionCase c = case_of(dtype, 19, 37, head_dim);
      c.softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = random_inputs(c);
      expect_near_float64(attend_both_ways(in, c), in, c);
    }
  }
}

TEST(CpuFlash, LongRowsKeepTheErrorOfShortOnes) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c = case_of(dtype, 20, 5000);
    c.batch = 1, c.heads = c.kv_heads = 1;
    const AttentionInputs in = random_inputs(c);
    const AttentionResult ref = reference_attention(in, c);
    const KernelOutput result = attend(in, c);
    expect_close("out", result.out, ref.out, 0.2 * allowed(dtype, ref.out));  // outputs are small: ~0.1
    expect_lse_close(result.lse, ref.lse, dtype);
  }
}

// One key holds all the weight: out is its value exactly.
TEST(CpuFlash, HugeScoresAreNoOverflow) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    AttentionCase c = case_of(dtype, 5, 40);
    c.softmax_scale = 1.0;
    AttentionInputs in = random_inputs(c);
    in.q.fill_(1e6);
    in.k.fill_(-1e4);
    in.k.select(1, 23).fill_(1e5);  // score 1.6e12, the others −1.6e11
    const KernelOutput result = attend(in, c);
    EXPECT_TRUE(same_bits(result.out, in.v.narrow(1, 23, 1).expand(in.q.sizes())));
    EXPECT_NEAR(result.lse.min().item<double>() / 1.6e12, 1.0, 1e-2);  // 1e5 and 1e6 round in bfloat16
  }
}

// Every key passes the reference of the keys before it: the running sums are rescaled again and again.
TEST(CpuFlash, ScoresThatRiseAlongTheKeys) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c = case_of(dtype, 50, 700);
    c.softmax_scale = 1.0;
    AttentionInputs in = random_inputs(c);
    in.q.fill_(1.0);
    // Sums of 16 equal numbers of 8 bits: the scores are exact, and only the softmax is in question.
    const at::Tensor rising = at::linspace(-60, 60, c.kv_len).to(at::kBFloat16).view({1, c.kv_len, 1, 1});
    in.k.copy_(rising.expand(in.k.sizes()));
    for (const bool is_causal : {false, true}) {
      c.is_causal = is_causal, c.q_begin = 650;
      const AttentionResult ref = reference_attention(in, c);
      const KernelOutput result = attend(in, c);
      expect_close("out", result.out, ref.out, allowed(dtype, ref.out));
      expect_lse_close(result.lse, ref.lse, dtype);
    }
  }
}

// A score falls far below or rises far above its row's others: neither is lost.
TEST(CpuFlash, OneKeyFarAboveTheOthersAtEveryPlace) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c = case_of(dtype, 3, 300);
    c.softmax_scale = 1.0;
    AttentionInputs in = random_inputs(c);
    in.q.fill_(1.0);
    for (const int64_t place : {0, 7, 8, 127, 128, 255, 256, 299}) {
      in.k.zero_();
      in.k.select(1, place).fill_(2.0);  // 32 above
      const AttentionResult ref = reference_attention(in, c);
      const KernelOutput result = attend(in, c);
      expect_close("out", result.out, ref.out, allowed(dtype, ref.out));
      expect_lse_close(result.lse, ref.lse, dtype);
    }
  }
}

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor rows_with_nan(const at::Tensor& out) { return out.isnan().any(3).any(2).any(0); }

TEST(CpuFlash, NanInAQueryStaysInItsRow) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    for (const double bad : {kNan, kInf}) {
      AttentionCase c = case_of(dtype, 60, 90);
      AttentionInputs in = random_inputs(c);
      const KernelOutput clean = attend(in, c);
      in.q.select(1, 20).select(2, 3).fill_(bad);
      const KernelOutput result = attend(in, c);
      EXPECT_TRUE(result.out.select(1, 20).isnan().all().item<bool>());
      EXPECT_TRUE(result.lse.select(2, 20).isnan().all().item<bool>() || bad == kInf);
      if (!runs_here(cpu_flash_kernel(), dtype)) continue;  // torch's op lets it out
      EXPECT_TRUE(same_bits(result.out.narrow(1, 0, 20), clean.out.narrow(1, 0, 20)));
      EXPECT_TRUE(same_bits(result.out.narrow(1, 21, 39), clean.out.narrow(1, 21, 39)));
    }
  }
}

// Every row that sees the key shows it, and no row in tiles before it.
TEST(CpuFlash, NanInAKeyOrValueReachesEveryRowThatSeesIt) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    for (const bool in_value : {false, true}) {
      AttentionCase c = case_of(dtype, 150, 150);
      c.is_causal = true;
      AttentionInputs in = random_inputs(c);
      (in_value ? in.v : in.k).select(1, 100).fill_(kNan);
      const at::Tensor nan = rows_with_nan(attend(in, c).out);
      EXPECT_TRUE(nan.narrow(0, 100, 50).all().item<bool>());
      if (runs_here(cpu_flash_kernel(), dtype)) {
        EXPECT_FALSE(nan.narrow(0, 0, 96).any().item<bool>());
      }
    }
  }
}

// A key with weight 0 in every row is as good as no key, in tiles of queries that are not full, too.
TEST(CpuFlash, KeysAtMinusInfinityLeaveTheOtherGradientsAlone) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    for (const int64_t q_len : {1, 31, 32, 50}) {
      const AttentionCase c = case_of(dtype, q_len, 40);
      AttentionInputs in = random_inputs(c);
      in.q = in.q.abs() + 0.5;
      in.k.select(1, 0).fill_(-kInf);
      const AttentionResult all = attend_both_ways(in, c);
      AttentionCase others = c;
      others.kv_len = 39;
      const AttentionInputs without{in.q, in.k.narrow(1, 1, 39), in.v.narrow(1, 1, 39), in.grad_out};
      const AttentionResult ref = reference_attention(without, others);
      expect_close("out", all.out, ref.out, allowed(dtype, ref.out));
      expect_close("dk", all.dk.narrow(1, 1, 39), ref.dk, allowed_of_scores(c, ref.dk));
      expect_close("dv", all.dv.narrow(1, 1, 39), ref.dv, allowed(dtype, ref.dv));
      EXPECT_EQ(max_abs(all.dk.select(1, 0)), 0.0);
      EXPECT_EQ(max_abs(all.dv.select(1, 0)), 0.0);
    }
  }
}

TEST(CpuFlash, ScalesThatVanishInFloat32) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    for (const double scale : {1e-30, 1e-40, -1e-40, 1e-46}) {
      AttentionCase c = case_of(dtype, 9, 9);
      c.is_causal = true, c.softmax_scale = scale;
      const AttentionInputs in = random_inputs(c);
      expect_near_float64(attend_both_ways(in, c), in, c);
    }
  }
}

TEST(CpuFlash, InfinityInAValueIsInfinity) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c = case_of(dtype, 20, 30);
    AttentionInputs in = random_inputs(c);
    in.v.select(1, 11).select(2, 5).fill_(kInf);
    const at::Tensor out = attend(in, c).out;
    EXPECT_TRUE(out.select(3, 5).isinf().all().item<bool>());
    EXPECT_FALSE(out.narrow(3, 0, 5).isinf().any().item<bool>());
  }
}

TEST(CpuFlash, RowsWithoutKeys) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c = case_of(dtype, 70, 20);
    c.is_causal = true, c.kv_begin = 60;
    const AttentionInputs in = random_inputs(c);
    const AttentionResult result = attend_both_ways(in, c);
    EXPECT_EQ(max_abs(result.out.narrow(1, 0, 60)), 0.0);
    EXPECT_TRUE(result.lse.narrow(2, 0, 60).isneginf().all().item<bool>());
    EXPECT_EQ(max_abs(result.dq.narrow(1, 0, 60)), 0.0);
    expect_near_float64(result, in, c);
    c.kv_begin = 1000;
    const AttentionResult nothing = attend_both_ways(in, c);
    for (const at::Tensor& zero : {nothing.out, nothing.dq, nothing.dk, nothing.dv}) EXPECT_EQ(max_abs(zero), 0.0);
    EXPECT_TRUE(nothing.lse.isneginf().all().item<bool>());
  }
}

TEST(CpuFlash, EmptyInputs) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase no_batch = case_of(dtype, 3, 3), no_queries = no_batch, no_keys = no_batch, no_heads = no_batch;
    no_batch.batch = 0;
    no_queries.q_len = 0;
    no_keys.kv_len = 0;
    no_heads.heads = no_heads.kv_heads = 0;
    for (const AttentionCase& c : {no_batch, no_queries, no_keys, no_heads}) check_kernel(tested_kernel(dtype), c);
  }
}

TEST(CpuFlash, UniformScoresGiveTheMean) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    check_uniform_probe(tested_kernel(dtype), dtype, false);
    check_uniform_probe(tested_kernel(dtype), dtype, true);
  }
}

// d(Σ out·g + Σ lse·h): the gradient of lse is one more term of the scores' gradient.
TEST(CpuFlash, GradientThroughLse) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c = case_of(dtype, 33, 50);
    c.is_causal = true, c.q_begin = 10, c.kv_begin = 15, c.heads = 4, c.kv_heads = 2;
    const AttentionInputs in = random_inputs(c);
    const at::Tensor grad_lse = random_tensor({c.batch, c.heads, c.q_len}, at::kFloat, 9);
    const KernelOutput output = attend(in, c);
    const KernelGrads grads = local_attention_backward(tested_kernel(dtype), in.grad_out, grad_lse, in.q, in.k, in.v,
                                                       output.out, output.lse, local_options(c));
    const auto exact = [](const at::Tensor& x) { return x.to(at::kDouble); };
    const KernelOutput wide = local_attention(math_kernel(), exact(in.q), exact(in.k), exact(in.v), local_options(c));
    const KernelGrads want = local_attention_backward(math_kernel(), exact(in.grad_out), exact(grad_lse), exact(in.q),
                                                      exact(in.k), exact(in.v), wide.out, wide.lse, local_options(c));
    expect_close("dq", grads.dq, want.dq, allowed(dtype, want.dq));
    expect_close("dk", grads.dk, want.dk, allowed(dtype, want.dk));
    expect_close("dv", grads.dv, want.dv, allowed(dtype, want.dv));
  }
}

TEST(CpuFlash, RefusesWhatItCannotDo) {
  KernelNeed need;
  need.head_dim = need.v_head_dim = 64;
  const auto refusal = [](const KernelNeed& n) { return cpu_flash_kernel().refusal(n).value_or(""); };
  need.dtype = "float64";
  EXPECT_EQ(refusal(need), "takes float32, bfloat16 or float16, not float64");
  need.dtype = "float32", need.device = "cuda";
  EXPECT_EQ(refusal(need), "runs on device cpu, not cuda");
  need.device = "cpu";
  if (!runs_here(cpu_flash_kernel(), at::kFloat)) {
    EXPECT_EQ(refusal(need).find("needs AVX2 or AVX-512 for float32, and this processor offers "), 0U);
    return;
  }
  EXPECT_EQ(refusal(need), "");
  need.has_mask = true;
  EXPECT_EQ(refusal(need), "takes no mask; cpu_fused does");
  need.has_mask = false, need.has_softcap = true;
  EXPECT_EQ(refusal(need), "computes no softcap; math does");
  need.has_softcap = false, need.head_dim = need.v_head_dim = 72;
  EXPECT_EQ(refusal(need), "needs a head_dim of 16, 32, 48, … 256, not 72");
  need.head_dim = need.v_head_dim = 272;
  EXPECT_EQ(refusal(need), "needs a head_dim of 16, 32, 48, … 256, not 272");
  need.head_dim = 64, need.v_head_dim = 32;
  EXPECT_EQ(refusal(need), "needs v_head_dim equal to head_dim=64, not 32");
}

}  // namespace
}  // namespace ulysses::kernels
