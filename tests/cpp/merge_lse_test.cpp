#include "ulysses/kernels/merge_lse.h"

#include "reference_attention.h"
#include "ulysses/base/error.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

constexpr double kInf = std::numeric_limits<double>::infinity();

// One batch, one row, one head, one value.
KernelOutput single(double out, double lse, at::ScalarType dtype = at::kFloat) {
  return {at::full({1, 1, 1, 1}, out, dtype), at::full({1, 1, 1}, lse, dtype == at::kDouble ? dtype : at::kFloat)};
}

KernelOutput merge(const std::vector<KernelOutput>& parts) {
  std::vector<at::Tensor> outs, lses;
  for (const KernelOutput& part : parts) {
    outs.push_back(part.out);
    lses.push_back(part.lse);
  }
  return merge_attention(outs, lses);
}

double out_of(const KernelOutput& x) { return x.out.item<double>(); }
double lse_of(const KernelOutput& x) { return x.lse.item<double>(); }

TEST(MergeAttention, EqualWeightsGiveTheMean) {
  const KernelOutput merged = merge({single(1.0, 0.5), single(3.0, 0.5)});
  EXPECT_NEAR(out_of(merged), 2.0, 1e-6);
  EXPECT_NEAR(lse_of(merged), 0.5 + std::log(2.0), 1e-6);
}

TEST(MergeAttention, WeightsFollowTheLse) {
  const KernelOutput merged =
      merge({single(10.0, std::log(1.0), at::kDouble), single(20.0, std::log(3.0), at::kDouble)});
  EXPECT_NEAR(out_of(merged), 17.5, 1e-12);
  EXPECT_NEAR(lse_of(merged), std::log(4.0), 1e-12);
}

TEST(MergeAttention, NoKeysOnOneSideKeepsTheBitsOfTheOther) {
  const KernelOutput part{random_tensor({2, 5, 3, 4}, at::kFloat, 1), random_tensor({2, 3, 5}, at::kFloat, 2) * 50};
  const KernelOutput none{at::zeros({2, 5, 3, 4}, at::kFloat), at::full({2, 3, 5}, -kInf, at::kFloat)};
  for (const KernelOutput& merged :
       {merge({part, none}), merge({none, part}), merge({none, part, none}), merge({part})}) {
    EXPECT_TRUE(at::equal(merged.out, part.out));
    EXPECT_TRUE(at::equal(merged.lse, part.lse));
  }
}

TEST(MergeAttention, NoKeysOnBothSidesGiveZeroAndMinusInfinity) {
  const KernelOutput merged = merge({single(0.0, -kInf), single(0.0, -kInf)});
  EXPECT_EQ(out_of(merged), 0.0);
  EXPECT_EQ(lse_of(merged), -kInf);
}

TEST(MergeAttention, HugeDifferencesInBothOrders) {
  for (const double high : {100.0, 1e4}) {
    for (const double low : {0.0, -1e4}) {
      for (const KernelOutput& merged :
           {merge({single(1.0, low), single(5.0, high)}), merge({single(5.0, high), single(1.0, low)})}) {
        EXPECT_EQ(out_of(merged), 5.0);
        EXPECT_EQ(lse_of(merged), high);
      }
    }
  }
}

// 256 parts of 1 + 2^-7: summed in bfloat16, the total would stand still at a power of two.
TEST(MergeAttention, SumsInFloat32AndRoundsOnce) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const std::vector<KernelOutput> parts(256, single(1.0 + std::pow(2.0, -7), 0.0, dtype));
    const KernelOutput merged = merge(parts);
    EXPECT_EQ(merged.out.scalar_type(), dtype);
    EXPECT_EQ(merged.lse.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
    EXPECT_EQ(out_of(merged), 1.0 + std::pow(2.0, -7));
    EXPECT_NEAR(lse_of(merged), std::log(256.0), 1e-6);
  }
}

TEST(MergeAttention, ThreePartsOfTheKeysGiveTheWhole) {
  AttentionCase whole;
  whole.q_len = 11, whole.kv_len = 29, whole.dtype = at::kDouble, whole.softmax_scale = 2.0;
  const AttentionInputs in = random_inputs(whole);
  std::vector<KernelOutput> parts;
  int64_t begin = 0;
  for (const int64_t size : {1, 20, 8}) {
    AttentionCase part = whole;
    part.kv_len = size;
    const AttentionResult r =
        reference_attention({in.q, in.k.narrow(1, begin, size), in.v.narrow(1, begin, size), in.grad_out}, part);
    parts.push_back({r.out, r.lse});
    begin += size;
  }
  const KernelOutput merged = merge(parts);
  const AttentionResult ref = reference_attention(in, whole);
  expect_close("out", merged.out, ref.out, 1e-12);
  expect_close("lse", merged.lse, ref.lse, 1e-12);
}

// Two results of one row: out = Σ w_i·o_i, dout/do_i = w_i, dout/dlse_i = w_i·(o_i − out), dlse/dlse_i = w_i.
TEST(MergeAttention, GradientsByHand) {
  for (const auto& [low, high] : {std::pair<double, double>{0.3, 1.1}, {0.0, 100.0}, {100.0, 0.0}, {-kInf, 2.0}}) {
    KernelOutput a = single(3.0, low, at::kDouble), b = single(-4.0, high, at::kDouble);
    for (const at::Tensor& leaf : {a.out, a.lse, b.out, b.lse}) leaf.requires_grad_(true);
    const KernelOutput merged = merge({a, b});
    (merged.out * 2.0 + merged.lse.unsqueeze(-1) * 5.0).sum().backward();
    const double w_a = 1.0 / (1.0 + std::exp(high - low)), w_b = 1.0 / (1.0 + std::exp(low - high));
    const double out = 3.0 * w_a - 4.0 * w_b;
    EXPECT_NEAR(out_of(merged), out, 1e-14);
    EXPECT_NEAR(a.out.grad().item<double>(), 2.0 * w_a, 1e-14);
    EXPECT_NEAR(b.out.grad().item<double>(), 2.0 * w_b, 1e-14);
    EXPECT_NEAR(a.lse.grad().item<double>(), 2.0 * w_a * (3.0 - out) + 5.0 * w_a, 1e-13);
    EXPECT_NEAR(b.lse.grad().item<double>(), 2.0 * w_b * (-4.0 - out) + 5.0 * w_b, 1e-13);
  }
}

TEST(MergeAttention, NoKeysOnAnySideGiveZeroGradients) {
  KernelOutput a = single(0.0, -kInf), b = single(0.0, -kInf);
  for (const at::Tensor& leaf : {a.out, a.lse, b.out, b.lse}) leaf.requires_grad_(true);
  const KernelOutput merged = merge({a, b});
  (merged.out + merged.lse.unsqueeze(-1)).sum().backward();
  for (const at::Tensor& leaf : {a.out, a.lse, b.out, b.lse}) EXPECT_EQ(leaf.grad().item<double>(), 0.0);
}

std::string refusal_of(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& lses) {
  try {
    merge_attention(outs, lses);
  } catch (const base::Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(MergeAttention, WhatDoesNotFitIsRefusedWithItsSizes) {
  const at::Tensor out = at::zeros({2, 5, 3, 4}), lse = at::zeros({2, 3, 5});
  const auto expect = [](const std::string& text, const std::string& what, const std::string& id) {
    EXPECT_NE(text.find(what), std::string::npos) << text;
    EXPECT_NE(text.find("[" + id + "]"), std::string::npos) << text;
  };
  expect(refusal_of({}, {}), "there are 0 outs and 0 lses", "CP024");
  expect(refusal_of({out, out}, {lse}), "there are 2 outs and 1 lses", "CP024");
  expect(refusal_of({out[0]}, {lse}), "outs[0] has 3 dimensions, sizes [5, 3, 4]", "CP020");
  expect(refusal_of({out, out.narrow(1, 0, 4)}, {lse, lse}), "outs[1] has sizes [2, 4, 3, 4], outs[0] [2, 5, 3, 4]",
         "CP024");
  expect(refusal_of({out, out}, {lse, lse.transpose(1, 2)}), "Fix: lses[1].transpose(1, 2)", "CP024");
  expect(refusal_of({out}, {lse.unsqueeze(-1)}), "Fix: lses[0] of shape [2, 3, 5]", "CP024");
  expect(refusal_of({out, out.to(at::kHalf)}, {lse, lse}), "outs[1] is float16, outs[0] float32", "CP021");
  expect(refusal_of({out.to(at::kLong)}, {lse}), "outs[0] is int64", "CP021");
  EXPECT_EQ(refusal_of({out, out}, {lse, lse}), "no error");
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
