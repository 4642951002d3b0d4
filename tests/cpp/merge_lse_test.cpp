#include "ulysses/kernels/merge_lse.h"

#include "reference_attention.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

constexpr double kInf = std::numeric_limits<double>::infinity();

// One batch, one row, one head, one value.
KernelOutput single(double out, double lse, at::ScalarType dtype = at::kFloat) {
  return {at::full({1, 1, 1, 1}, out, dtype), at::full({1, 1, 1}, lse, dtype == at::kDouble ? dtype : at::kFloat)};
}

double out_of(const KernelOutput& x) { return x.out.item<double>(); }
double lse_of(const KernelOutput& x) { return x.lse.item<double>(); }

TEST(MergeLse, EqualWeightsGiveTheMean) {
  const KernelOutput merged = merge_lse(single(1.0, 0.5), single(3.0, 0.5));
  EXPECT_NEAR(out_of(merged), 2.0, 1e-6);
  EXPECT_NEAR(lse_of(merged), 0.5 + std::log(2.0), 1e-6);
}

TEST(MergeLse, WeightsFollowTheLse) {
  const KernelOutput merged =
      merge_lse(single(10.0, std::log(1.0), at::kDouble), single(20.0, std::log(3.0), at::kDouble));
  EXPECT_NEAR(out_of(merged), 17.5, 1e-12);
  EXPECT_NEAR(lse_of(merged), std::log(4.0), 1e-12);
}

TEST(MergeLse, NoKeysOnOneSideKeepsTheBitsOfTheOther) {
  const KernelOutput part{random_tensor({2, 5, 3, 4}, at::kFloat, 1), random_tensor({2, 3, 5}, at::kFloat, 2) * 50};
  const KernelOutput none{at::zeros({2, 5, 3, 4}, at::kFloat), at::full({2, 3, 5}, -kInf, at::kFloat)};
  for (const KernelOutput& merged : {merge_lse(part, none), merge_lse(none, part)}) {
    EXPECT_TRUE(at::equal(merged.out, part.out));
    EXPECT_TRUE(at::equal(merged.lse, part.lse));
  }
}

TEST(MergeLse, NoKeysOnBothSidesGiveZeroAndMinusInfinity) {
  const KernelOutput merged = merge_lse(single(0.0, -kInf), single(0.0, -kInf));
  EXPECT_EQ(out_of(merged), 0.0);
  EXPECT_EQ(lse_of(merged), -kInf);
}

TEST(MergeLse, HugeDifferencesInBothOrders) {
  for (const double high : {100.0, 1e4}) {
    for (const double low : {0.0, -1e4}) {
      for (const KernelOutput& merged :
           {merge_lse(single(1.0, low), single(5.0, high)), merge_lse(single(5.0, high), single(1.0, low))}) {
        EXPECT_EQ(out_of(merged), 5.0);
        EXPECT_EQ(lse_of(merged), high);
      }
    }
  }
}

TEST(MergeLse, SumsInFloat32AndKeepsFloat64) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    const KernelOutput merged = merge_lse(single(1.0, 0.0, dtype), single(2.0, 0.0, dtype));
    EXPECT_EQ(merged.out.scalar_type(), at::kFloat);
    EXPECT_EQ(merged.lse.scalar_type(), at::kFloat);
  }
  EXPECT_EQ(merge_lse(single(1, 0, at::kDouble), single(2, 0, at::kDouble)).out.scalar_type(), at::kDouble);
}

TEST(MergeLse, ThreePartsOfTheKeysGiveTheWhole) {
  AttentionCase whole;
  whole.q_len = 11, whole.kv_len = 29, whole.dtype = at::kDouble, whole.softmax_scale = 2.0;
  const AttentionInputs in = random_inputs(whole);
  KernelOutput merged;
  int64_t begin = 0;
  for (const int64_t size : {1, 20, 8}) {
    AttentionCase part = whole;
    part.kv_len = size;
    const AttentionResult r =
        reference_attention({in.q, in.k.narrow(1, begin, size), in.v.narrow(1, begin, size), in.grad_out}, part);
    merged = begin == 0 ? KernelOutput{r.out, r.lse} : merge_lse(merged, {r.out, r.lse});
    begin += size;
  }
  const AttentionResult ref = reference_attention(in, whole);
  expect_close("out", merged.out, ref.out, 1e-12);
  expect_close("lse", merged.lse, ref.lse, 1e-12);
}

TEST(LseForBackward, TurnsOnlyMinusInfinityAround) {
  const at::Tensor lse = at::full({1, 1, 3}, 2.5, at::kFloat);
  lse.select(2, 1).fill_(-kInf);
  const at::Tensor result = lse_for_backward(lse);
  EXPECT_EQ(result[0][0][0].item<double>(), 2.5);
  EXPECT_EQ(result[0][0][1].item<double>(), kInf);
  EXPECT_EQ(result[0][0][2].item<double>(), 2.5);
  EXPECT_EQ(lse[0][0][1].item<double>(), -kInf);  // the input is left as it was
}

}  // namespace
}  // namespace ulysses::kernels
