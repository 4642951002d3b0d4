#include <ATen/Parallel.h>
#include <ATen/ops/full.h>

#include "cpu_flash.h"

namespace ulysses::kernels {
namespace {

using namespace ulysses::testing;

AttentionCase long_case(at::ScalarType dtype) {
  AttentionCase c;
  c.dtype = dtype, c.q_len = 333, c.kv_len = 1100, c.heads = 4, c.kv_heads = 2, c.head_dim = c.v_head_dim = 32;
  return c;
}

// Where the kernel runs: torch's op has other bits for other slices.
std::vector<at::ScalarType> dtypes_here() {
  std::vector<at::ScalarType> dtypes;
  for (const at::ScalarType dtype : flash_dtypes()) {
    if (&tested_kernel(dtype) == &cpu_flash_kernel()) dtypes.push_back(dtype);
  }
  return dtypes;
}

void expect_same_bits(const AttentionResult& a, const AttentionResult& b) {
  EXPECT_TRUE(same_bits(a.out, b.out)) << "out";
  EXPECT_TRUE(same_bits(a.lse, b.lse)) << "lse";
  EXPECT_TRUE(same_bits(a.dq, b.dq)) << "dq";
  EXPECT_TRUE(same_bits(a.dk, b.dk)) << "dk";
  EXPECT_TRUE(same_bits(a.dv, b.dv)) << "dv";
}

TEST(CpuFlashBits, RowsDoNotDependOnHowQueriesAreSliced) {
  for (const at::ScalarType dtype : dtypes_here()) {
    for (const bool is_causal : {false, true}) {
      AttentionCase c = long_case(dtype);
      c.is_causal = is_causal, c.q_begin = 400;
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = random_inputs(c);
      const AttentionResult whole = attend_both_ways(in, c);
      for (const auto& [begin, size] : {std::pair<int64_t, int64_t>{0, 1}, {1, 16}, {17, 63}, {5, 200}, {300, 33}}) {
        AttentionCase part = c;
        part.q_begin += begin, part.q_len = size;
        const AttentionInputs rows{in.q.narrow(1, begin, size), in.k, in.v, in.grad_out.narrow(1, begin, size)};
        const AttentionResult result = attend_both_ways(rows, part);
        EXPECT_TRUE(same_bits(result.out, whole.out.narrow(1, begin, size))) << begin;
        EXPECT_TRUE(same_bits(result.lse, whole.lse.narrow(2, begin, size))) << begin;
        EXPECT_TRUE(same_bits(result.dq, whole.dq.narrow(1, begin, size))) << begin;
      }
    }
  }
}

TEST(CpuFlashBits, HeadsDoNotDependOnTheOthers) {
  for (const at::ScalarType dtype : dtypes_here()) {
    AttentionCase c = long_case(dtype);
    c.is_causal = true, c.q_begin = 767;
    const AttentionInputs in = random_inputs(c);
    const AttentionResult whole = attend_both_ways(in, c);
    for (const int64_t kv_head : {0, 1}) {  // a whole group: its gradients of K and V too
      const AttentionInputs group{in.q.narrow(2, 2 * kv_head, 2), in.k.narrow(2, kv_head, 1),
                                  in.v.narrow(2, kv_head, 1), in.grad_out.narrow(2, 2 * kv_head, 2)};
      const AttentionResult part = attend_both_ways(group, c);
      expect_same_bits(
          part, {whole.out.narrow(2, 2 * kv_head, 2), whole.lse.narrow(1, 2 * kv_head, 2),
                 whole.dq.narrow(2, 2 * kv_head, 2), whole.dk.narrow(2, kv_head, 1), whole.dv.narrow(2, kv_head, 1)});
    }
    const AttentionInputs one{in.q.narrow(2, 3, 1), in.k.narrow(2, 1, 1), in.v.narrow(2, 1, 1), {}};
    EXPECT_TRUE(same_bits(attend(one, c).out, whole.out.narrow(2, 3, 1)));
  }
}

TEST(CpuFlashBits, BatchesDoNotDependOnTheOthers) {
  for (const at::ScalarType dtype : dtypes_here()) {
    const AttentionCase c = long_case(dtype);
    const AttentionInputs in = random_inputs(c);
    const AttentionResult whole = attend_both_ways(in, c);
    const auto second = [](const at::Tensor& x) { return x.narrow(0, 1, 1); };
    const AttentionResult part = attend_both_ways({second(in.q), second(in.k), second(in.v), second(in.grad_out)}, c);
    expect_same_bits(part,
                     {second(whole.out), second(whole.lse), second(whole.dq), second(whole.dk), second(whole.dv)});
  }
}

TEST(CpuFlashBits, AnyNumberOfThreadsGivesTheSame) {
  const int before = at::get_num_threads();
  for (const at::ScalarType dtype : dtypes_here()) {
    AttentionCase c = long_case(dtype);
    c.is_causal = true, c.q_begin = 700;
    const AttentionInputs in = random_inputs(c);
    at::set_num_threads(1);
    const AttentionResult one = attend_both_ways(in, c);
    for (const int threads : {2, 3, 7}) {
      at::set_num_threads(threads);
      expect_same_bits(attend_both_ways(in, c), one);
    }
  }
  at::set_num_threads(before);
}

TEST(CpuFlashBits, StridesDoNotMatter) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    for (const int64_t len : {1, 7, 257}) {
      AttentionCase c;
      c.q_len = c.kv_len = len, c.dtype = dtype, c.is_causal = true;
      SCOPED_TRACE(describe(c));
      const AttentionInputs in = random_inputs(c);
      const AttentionResult dense = attend_both_ways(in, c);
      const AttentionInputs views{token_major_view(in.q), token_major_view(in.k), token_major_view(in.v),
                                  token_major_view(in.grad_out)};
      expect_same_bits(attend_both_ways(views, c), dense);
      const auto every_second = [](const at::Tensor& x) {
        at::Tensor wide = at::full({x.size(0), x.size(1), x.size(2), 2 * x.size(3)}, 1e4, x.options());
        return wide.slice(3, 0, std::nullopt, 2).copy_(x);
      };
      expect_same_bits(
          attend_both_ways({every_second(in.q), every_second(in.k), every_second(in.v), every_second(in.grad_out)}, c),
          dense);
    }
  }
}

// As a convolution leaves them: [B, h, D, S] in memory. What is made like one of them must not be written by its
// strides.
TEST(CpuFlashBits, ChannelsFirstInputsGiveTheSame) {
  const auto channels_first = [](const at::Tensor& x) {
    return x.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
  };
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c;
    c.q_len = c.kv_len = 30, c.dtype = dtype;
    const AttentionInputs in = random_inputs(c);
    const AttentionResult dense = attend_both_ways(in, c);
    for (at::Tensor AttentionInputs::*one :
         {&AttentionInputs::q, &AttentionInputs::k, &AttentionInputs::v, &AttentionInputs::grad_out}) {
      AttentionInputs views = in;
      views.*one = channels_first(in.*one);
      expect_same_bits(attend_both_ways(views, c), dense);
    }
  }
}

TEST(CpuFlashBits, OverlappingQueriesGiveTheSame) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c;
    c.batch = 1, c.q_len = c.kv_len = 12, c.heads = c.kv_heads = 1, c.dtype = dtype;
    AttentionInputs in = random_inputs(c);
    const at::Tensor windows = random_tensor({600}, dtype, 3).as_strided(in.q.sizes(), {0, 1, 0, 1});
    in.q = windows.contiguous();
    const AttentionResult dense = attend_both_ways(in, c);
    in.q = windows;
    expect_same_bits(attend_both_ways(in, c), dense);
  }
}

TEST(CpuFlashBits, ExpandedInputsAreReadAsTheyAre) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c;
    c.q_len = 40, c.kv_len = 20, c.dtype = dtype;
    AttentionInputs in = random_inputs(c);
    in.k = in.k.narrow(1, 0, 1).expand(in.k.sizes());
    in.v = in.v.narrow(2, 0, 1).expand(in.v.sizes());
    in.grad_out = at::full({}, 1.0, in.q.options()).expand(in.q.sizes());
    const AttentionInputs dense{in.q, in.k.contiguous(), in.v.contiguous(), in.grad_out.contiguous()};
    expect_same_bits(attend_both_ways(in, c), attend_both_ways(dense, c));
  }
}

// What the second exchange sends lies in the order that it is sent in.
TEST(CpuFlashBits, OutKeepsTheMemoryOrderOfQ) {
  for (const at::ScalarType dtype : flash_dtypes()) {
    AttentionCase c;
    c.dtype = dtype;
    const AttentionInputs in = random_inputs(c);
    EXPECT_TRUE(attend(in, c).out.is_contiguous());
    const AttentionInputs views{token_major_view(in.q), in.k, in.v, {}};
    EXPECT_TRUE(attend(views, c).out.transpose(0, 1).is_contiguous());  // [S, B, h, D] in memory
  }
}

}  // namespace
}  // namespace ulysses::kernels
