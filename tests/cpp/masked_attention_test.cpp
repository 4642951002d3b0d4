#include "masked_attention.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "ulysses/kernels/builtin_kernels.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

const std::vector<const Kernel*>& cpu_kernels() {
  static const std::vector<const Kernel*> kernels = {&fused_cpu_kernel(), &math_kernel()};
  return kernels;
}

AttentionCase small(int64_t q_begin, int64_t q_len, int64_t kv_begin, int64_t kv_len, int64_t heads, int64_t kv_heads,
                    bool is_causal) {
  AttentionCase c;
  c.q_begin = q_begin, c.q_len = q_len, c.kv_begin = kv_begin, c.kv_len = kv_len;
  c.heads = heads, c.kv_heads = kv_heads, c.is_causal = is_causal;
  c.head_dim = c.v_head_dim = 8;
  return c;
}

// Not causal; the square; keys amid queries; queries amid keys; both overlaps; queries and keys of length one.
const std::vector<AttentionCase>& mask_cases() {
  static const std::vector<AttentionCase> cases = {
      small(0, 7, 0, 20, 4, 4, false), small(5, 17, 5, 17, 8, 2, true), small(0, 20, 10, 7, 4, 1, true),
      small(16, 9, 0, 40, 4, 2, true), small(8, 30, 2, 19, 6, 3, true), small(2, 19, 8, 30, 4, 4, true),
      small(30, 1, 0, 33, 4, 2, true), small(4, 6, 4, 1, 4, 2, true),   small(0, 33, 0, 33, 3, 1, false)};
  return cases;
}

void check_masked(const Kernel& kernel, const MaskedInputs& in, const AttentionCase& c, std::string_view mask) {
  SCOPED_TRACE(std::string(kernel.name()) + ", mask " + std::string(mask) + ", " + describe(c));
  expect_masked_result(run_masked(kernel, in, c), in, c);
}

// Each pair of a case and a kind of mask in two of the dtypes; each kind in all of them.
at::ScalarType dtype_of(size_t index) { return float_dtypes()[index % float_dtypes().size()]; }

TEST(MaskedAttention, EveryKindOfMaskMatchesFloat64) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (size_t i = 0; i < mask_cases().size(); ++i) {
      for (size_t j = 0; j < mask_kinds().size(); ++j) {
        for (const bool is_bool : {false, true}) {
          AttentionCase c = mask_cases()[i];
          c.dtype = dtype_of(i + j + (is_bool ? 2 : 0));
          const at::ScalarType mask_dtype = is_bool ? at::kBool : c.dtype;
          const MaskedInputs in{random_inputs(c), random_mask(mask_kinds()[j], c, mask_dtype), {}, {}};
          check_masked(*kernel, in, c, std::string(mask_kinds()[j].name) + " " + at::toString(mask_dtype));
        }
      }
    }
  }
}

// One block of keys of the fused op holds 512: whole blocks hidden at the start, in the middle and at the end.
TEST(MaskedAttention, LongKeysWithWholeBlocksHidden) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const bool is_causal : {false, true}) {
        AttentionCase c = small(1000, 20, 0, 1600, 2, 1, is_causal);
        c.dtype = dtype;
        for (const auto& [begin, size] : {std::pair<int64_t, int64_t>{0, 1010}, {500, 600}, {900, 700}, {0, 1600}}) {
          MaskedInputs in{random_inputs(c), at::ones({c.batch, 1, 1, c.kv_len}, at::kBool), {}, {}};
          in.mask.narrow(3, begin, size).select(0, 0).zero_();
          check_masked(*kernel, in, c, "from " + std::to_string(begin));
        }
      }
    }
  }
}

TEST(MaskedAttention, MaskOfAnotherDtypeThanTheQueries) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (const at::ScalarType dtype : float_dtypes()) {
      for (const at::ScalarType mask_dtype : float_dtypes()) {
        AttentionCase c = small(2, 19, 8, 30, 4, 2, true);
        c.dtype = dtype;
        const MaskedInputs in{random_inputs(c), random_mask(mask_kinds()[3], c, mask_dtype), {}, {}};
        check_masked(*kernel, in, c, at::toString(mask_dtype));
      }
    }
  }
}

// The lowest finite number, as many models write it: hides a key beside others, and a row that has nothing else
// attends to all alike. In float16 it would be −inf.
TEST(MaskedAttention, LowestFiniteNumberIsNotMinusInfinity) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      AttentionCase c = small(0, 5, 0, 8, 4, 2, false);
      c.dtype = dtype;
      MaskedInputs in{random_inputs(c), at::zeros({1, 1, c.q_len, c.kv_len}, at::kFloat), {}, {}};
      in.mask.narrow(3, 2, 6).fill_(std::numeric_limits<float>::lowest());
      in.mask.select(2, 4).fill_(std::numeric_limits<float>::lowest());
      SCOPED_TRACE(std::string(kernel->name()) + " " + describe(c));
      const MaskedResult result = run_masked(*kernel, in, c);
      const at::Tensor mean = in.tensors.v.to(at::kDouble).mean(1).repeat_interleave(2, 1);
      EXPECT_LE(max_error(result.plain.out.select(1, 4), mean), dtype == at::kFloat ? 1e-6 : 1e-2);
      const MaskedResult two = run_masked(
          *kernel,
          {{in.tensors.q, in.tensors.k.narrow(1, 0, 2), in.tensors.v.narrow(1, 0, 2), in.tensors.grad_out}, {}, {}, {}},
          c);
      EXPECT_LE(max_error(result.plain.out.narrow(1, 0, 4), two.plain.out.narrow(1, 0, 4)),
                dtype == at::kFloat ? 1e-6 : 1e-2);
    }
  }
}

TEST(MaskedAttention, ScaleOfAnySignWithAMask) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (const double scale : {-0.7, 0.0}) {
      for (AttentionCase c : mask_cases()) {
        c.softmax_scale = scale;
        for (const at::ScalarType mask_dtype : {at::kBool, at::kFloat}) {
          const MaskedInputs in{random_inputs(c), random_mask(mask_kinds()[5], c, mask_dtype), {}, {}};
          check_masked(*kernel, in, c, at::toString(mask_dtype));
        }
      }
    }
  }
}

TEST(MaskedAttention, HeadThatSeesOneKeyCopiesItsValue) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (const at::ScalarType dtype : float_dtypes()) {
      AttentionCase c = small(0, 8, 0, 8, 4, 2, false);
      c.batch = 1, c.dtype = dtype;
      SCOPED_TRACE(std::string(kernel->name()) + " " + describe(c));
      MaskedInputs in{random_inputs(c), at::zeros({1, 4, 8, 8}, at::kBool), {}, {}};
      for (int64_t head = 0; head < 4; ++head) in.mask.select(1, head).select(2, head).fill_(true);
      const MaskedResult result = run_masked(*kernel, in, c);
      for (int64_t head = 0; head < 4; ++head) {
        const at::Tensor q = in.tensors.q.select(2, head).to(at::kDouble);
        const at::Tensor k = in.tensors.k.select(2, head / 2).select(1, head).to(at::kDouble);
        for (int64_t row = 0; row < 8; ++row)
          EXPECT_TRUE(at::equal(result.plain.out[0][row][head], in.tensors.v[0][head][head / 2]));
        EXPECT_LE(max_error(result.plain.lse.select(1, head), (q * k.unsqueeze(1)).sum(-1) * c.softmax_scale),
                  dtype == at::kDouble ? 1e-14 : 1e-5);
      }
      // One key has weight 1 whatever its score.
      EXPECT_LE(max_abs(result.plain.dq), dtype == at::kDouble ? 1e-14 : 1e-6);
      expect_masked_result(result, in, c);
    }
  }
}

// q = k = 0: key j weighs exp(bias_j).
TEST(MaskedAttention, BiasIsTheLogarithmOfAWeight) {
  for (const Kernel* kernel : cpu_kernels()) {
    AttentionCase c = small(0, 3, 0, 3, 2, 1, false);
    c.dtype = at::kDouble;
    MaskedInputs in{random_inputs(c), at::log(at::arange(1, 4, at::kDouble)).view({1, 1, 1, 3}), {}, {}};
    in.tensors.q.zero_();
    in.tensors.k.zero_();
    const MaskedResult result = run_masked(*kernel, in, c);
    const at::Tensor v = in.tensors.v;
    const at::Tensor mean = (v.select(1, 0) + v.select(1, 1) * 2.0 + v.select(1, 2) * 3.0) / 6.0;
    EXPECT_LE(max_error(result.plain.out, mean.unsqueeze(1).expand_as(result.plain.out)), 1e-14);
    EXPECT_LE(max_abs(result.plain.lse - std::log(6.0)), 1e-14);
  }
}

TEST(MaskedAttention, NothingVisibleGivesZeroMinusInfinityAndZeroGradients) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (const at::ScalarType dtype : float_dtypes()) {
      for (AttentionCase c : mask_cases()) {
        c.dtype = dtype;
        SCOPED_TRACE(std::string(kernel->name()) + " " + describe(c));
        for (const at::Tensor& mask : {at::zeros({1, 1, 1, c.kv_len}, at::kBool),
                                       at::full({c.batch, c.heads, c.q_len, c.kv_len}, kNoScore, dtype)}) {
          const MaskedResult result = run_masked(*kernel, {random_inputs(c), mask, {}, {}}, c);
          EXPECT_TRUE(result.plain.lse.isneginf().all().item<bool>());
          for (const at::Tensor& x : {result.plain.out, result.plain.dq, result.plain.dk, result.plain.dv})
            EXPECT_EQ(max_abs(x), 0.0);
        }
      }
    }
  }
}

// The largest block of memory that torch allocates on this thread while this lives.
class LargestAllocation final : public c10::MemoryReportingInfoBase {
 public:
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { bytes = std::max(bytes, size); }
  int64_t bytes = 0;
};

TEST(MaskedAttention, FusedKernelNeverWritesAMaskOutToAllQueries) {
  constexpr int64_t kLen = 2048;
  AttentionCase c = small(0, kLen, 0, kLen, 1, 1, true);
  c.batch = 1;
  const AttentionInputs x = random_inputs(c);
  const at::Tensor visible = at::arange(kLen, at::kLong) % 3 != 0;
  for (const at::Tensor& mask : {visible, visible.to(at::kFloat), visible.to(at::kDouble)}) {
    const at::Tensor by_key = mask.view({1, 1, 1, kLen});
    for (const at::Tensor& each :
         {by_key, by_key.expand({1, 1, kLen, kLen}), by_key.transpose(2, 3).expand({1, 1, kLen, kLen})}) {
      const auto largest = std::make_shared<LargestAllocation>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, largest);
      run_masked(fused_cpu_kernel(), {x, each, {}, {}}, c);
      EXPECT_GT(largest->bytes, 0);
      EXPECT_LT(largest->bytes, kLen * kLen);  // one byte a score
    }
  }
}

// Keeps the masks that a kernel was handed.
class MaskRecorder final : public Kernel {
 public:
  std::string_view name() const override { return "recorder"; }
  std::optional<std::string> refusal(const KernelNeed&) const override { return std::nullopt; }
  KernelOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const KernelOptions& options) const override {
    masks.push_back(options.attn_mask);
    return math_kernel().forward(q, k, v, options);
  }
  KernelGrads backward(const at::Tensor& grad_out, const at::Tensor& grad_lse, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                       const KernelOptions& options) const override {
    ++backward_calls;
    return math_kernel().backward(grad_out, grad_lse, q, k, v, out, lse, options);
  }
  mutable std::vector<at::Tensor> masks;
  mutable int backward_calls = 0;
};

TEST(MaskedAttention, BlocksGetViewsOfTheMaskAndAxesOfSizeOneStay) {
  const AttentionCase c =
      small(8, 30, 2, 19, 4, 2, true);  // full [8, 21) × [2, 8), square [8, 21), full [21, 38) × all
  const at::Tensor per_query = at::ones({1, 1, 30, 19}, at::kBool), per_key = at::ones({2, 1, 1, 19}, at::kBool);
  for (const at::Tensor& mask : {per_query, per_key}) {
    const MaskRecorder recorder;
    run_masked(recorder, {random_inputs(c), mask, {}, {}}, c);
    ASSERT_EQ(recorder.masks.size(), 3U);
    const bool by_query = mask.size(2) > 1;
    EXPECT_EQ(recorder.masks[0].sizes().slice(2), (at::IntArrayRef{by_query ? 13 : 1, 6}));
    EXPECT_EQ(recorder.masks[1].sizes().slice(2), (at::IntArrayRef{by_query ? 13 : 1, 13}));
    EXPECT_EQ(recorder.masks[2].sizes().slice(2), (at::IntArrayRef{by_query ? 17 : 1, 19}));
    for (const at::Tensor& part : recorder.masks) EXPECT_TRUE(part.is_alias_of(mask));
  }
  const MaskRecorder recorder;
  run_masked(recorder, {random_inputs(c), {}, {}, {}}, c);
  for (const at::Tensor& part : recorder.masks) EXPECT_FALSE(part.defined());
}

TEST(MaskedAttention, GradientOfTheMaskMatchesFloat64) {
  for (const Kernel* kernel : cpu_kernels()) {
    for (size_t i = 0; i < mask_cases().size(); ++i) {
      for (size_t j = 0; j < mask_kinds().size(); ++j) {
        AttentionCase c = mask_cases()[i];
        c.dtype = dtype_of(i + j);
        const MaskedInputs in{random_inputs(c), random_mask(mask_kinds()[j], c, c.dtype), {}, {}};
        SCOPED_TRACE(std::string(kernel->name()) + ", mask " + mask_kinds()[j].name + ", " + describe(c));
        const MaskedResult result = run_masked(*kernel, in, c, /*mask_needs_grad=*/true);
        ASSERT_EQ(result.dmask.sizes(), in.mask.sizes());
        expect_masked_result(result, in, c);
      }
    }
  }
}

TEST(MaskedAttention, GradientOfAMaskIsSummedInFloat32For16BitQueries) {
  AttentionCase c = small(8, 300, 2, 200, 4, 2, true);  // three blocks
  c.dtype = at::kBFloat16;
  MaskedInputs in{random_inputs(c), at::zeros({1, 1, 1, c.kv_len}, at::kFloat), {}, {}};
  const at::Tensor ref = reference_masked_attention(in, c).dmask;
  const at::Tensor dmask = run_masked(math_kernel(), in, c, true).dmask;
  expect_close("float32", dmask, ref, 5e-3 * max_abs(ref));
  EXPECT_FALSE(at::equal(dmask, dmask.to(at::kBFloat16).to(at::kFloat)));  // it holds more than 16 bits
  in.mask = in.mask.to(at::kBFloat16);
  EXPECT_TRUE(at::equal(run_masked(math_kernel(), in, c, true).dmask, dmask.to(at::kBFloat16)));
}

TEST(MaskedAttention, GradientOfAMaskOverNothingIsZero) {
  AttentionCase no_queries = small(0, 0, 0, 4, 4, 2, true), hidden = small(0, 4, 4, 6, 4, 2, true);
  for (const AttentionCase& c : {no_queries, hidden}) {
    MaskedInputs in{random_inputs(c), at::zeros({1, 1, 1, c.kv_len}, at::kBFloat16), {}, {}};
    const at::Tensor dmask = run_masked(fused_cpu_kernel(), in, c, true).dmask;
    EXPECT_TRUE(at::equal(dmask, in.mask));
    EXPECT_EQ(dmask.scalar_type(), at::kBFloat16);
  }
}

TEST(MaskedAttention, GradientOfTheMaskOrOfLseRunsInMath) {
  const AttentionCase c = small(0, 6, 0, 6, 4, 2, true);
  const MaskRecorder recorder;
  MaskedInputs in{random_inputs(c), random_mask(mask_kinds()[2], c, at::kFloat), {}, {}};
  run_masked(recorder, in, c);
  EXPECT_EQ(recorder.backward_calls, 1);
  run_masked(recorder, in, c, /*mask_needs_grad=*/true);
  in.grad_lse = random_tensor({c.batch, c.heads, c.q_len}, at::kFloat, 5);
  run_masked(recorder, in, c);
  EXPECT_EQ(recorder.backward_calls, 1);
}

}  // namespace
}  // namespace ulysses::kernels
