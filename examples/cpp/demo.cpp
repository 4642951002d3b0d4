// Context-parallel attention in C++, without Python: four ranks as threads of this program, a length that four does not
// divide and a head count that it does not divide either, forward and backward, against float64 attention on one rank.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>
#include <ulysses/ulysses.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using ulysses::AttentionOptions;
using ulysses::Group;

constexpr int64_t kRanks = 4;
constexpr int64_t kSeqLen = 3001;
constexpr int64_t kHeads = 30;
constexpr int64_t kKvHeads = 6;
constexpr int64_t kHeadDim = 8;
constexpr double kTolerance = 1e-5;  // float32, times the largest value where that is above 1

// Torch's attention on [B, S, H, D]: what an author has at hand already.
at::Tensor sdpa(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                std::optional<double> softmax_scale) {
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, is_causal,
                                          softmax_scale, /*enable_gqa=*/true)
      .transpose(1, 2);
}

// A backend of the author's own: the local attention and nothing else. Checks, agreement, exchange, restoring and
// backward come from the base class.
class SdpaProcessor final : public ulysses::UlyssesAttentionProcessor {
 public:
  std::vector<std::string> supports() const override { return {"is_causal", "softmax_scale"}; }

 protected:
  ulysses::KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const ulysses::AttendCall& call) override {
    return {sdpa(q, k, v, call.is_causal, call.softmax_scale), {}};
  }
};

// The whole sequence, its gradient from above, and what attention must give for them. A run fills the same struct.
struct Sequence {
  at::Tensor q, k, v, grad_out;
  at::Tensor out, dq, dk, dv;
};

Sequence make_sequence() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(2024);
  const auto draw = [&](int64_t heads) {
    return at::randn({1, kSeqLen, heads, kHeadDim}, generator, at::TensorOptions(at::kFloat));
  };
  return {draw(kHeads), draw(kKvHeads), draw(kKvHeads), draw(kHeads)};
}

// The doctor's float64 reference, in blocks of queries: all scores at once would take 2 GB.
void add_reference(Sequence& s) {
  constexpr int64_t kBlock = 10;  // larger blocks fall out of the cache
  const auto like = [](const at::Tensor& x) { return at::zeros_like(x, x.options().dtype(at::kDouble)); };
  s.out = like(s.q), s.dq = like(s.q), s.dk = like(s.k), s.dv = like(s.v);
  for (int64_t begin = 0; begin < kSeqLen; begin += kBlock) {
    const auto block = [&](const at::Tensor& x) { return x.narrow(1, begin, std::min(kBlock, kSeqLen - begin)); };
    ulysses::doctor::Question question;
    question.q = block(s.q), question.k = s.k, question.v = s.v, question.grad_out = block(s.grad_out);
    question.c.cp_size = question.c.batch = 1;
    question.c.lengths = question.c.padded_lengths = {question.q.size(1)};
    question.c.kv_lengths = {kSeqLen};
    question.c.num_heads = kHeads, question.c.num_kv_heads = kKvHeads;
    question.c.head_dim = question.c.value_head_dim = kHeadDim;
    const ulysses::doctor::Reference grads = ulysses::doctor::attention_reference(question);
    block(s.out).copy_(grads.out);
    block(s.dq).copy_(grads.dq);
    s.dk.add_(grads.dk);
    s.dv.add_(grads.dv);
  }
}

using Attention = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const Group& group, const ulysses::SequenceLayout& layout)>;

// Forward and backward on every rank; the ranks share memory, so each writes its rows of the result.
Sequence run(const Sequence& s, const Attention& attention) {
  ulysses::UlyssesContextParallelPolicy policy;
  policy.require_seq_divisible = false;  // shards of 751, 750, 750 and 750 tokens, no padding
  const ulysses::SequenceLayout layout(kSeqLen, kRanks, policy);
  Sequence result{{}, {}, {}, {}, at::zeros_like(s.q), at::zeros_like(s.q), at::zeros_like(s.k), at::zeros_like(s.v)};
  ulysses::run_ranks(kRanks, [&](int64_t rank, const Group& group) {
    const auto shard = [&](const at::Tensor& x) { return ulysses::shard(x, layout, rank).detach(); };
    const at::Tensor q = shard(s.q).requires_grad_(true);
    const at::Tensor k = shard(s.k).requires_grad_(true);
    const at::Tensor v = shard(s.v).requires_grad_(true);
    const at::Tensor out = attention(q, k, v, group, layout);
    out.backward(shard(s.grad_out));
    shard(result.out).copy_(out.detach());
    shard(result.dq).copy_(q.grad());
    shard(result.dk).copy_(k.grad());
    shard(result.dv).copy_(v.grad());
  });
  return result;
}

// The largest error, relative to the largest value where that is above 1.
double error(const at::Tensor& got, const at::Tensor& wanted) {
  return (got.to(at::kDouble) - wanted).abs().max().item<double>() / std::max(1.0, wanted.abs().max().item<double>());
}

struct Row {
  std::string name;
  bool must_match;
  Attention attention;
};

Attention with_options(const std::string& backend, const std::string& strategy) {
  AttentionOptions options;
  options.policy.backend_name = backend;
  options.strategy = strategy;
  return [options](const auto& q, const auto& k, const auto& v, const Group& group, const auto& layout) {
    return ulysses::ulysses_attention(q, k, v, group, layout, options).out;
  };
}

// Prints one line of the table; true if the run is as it must be.
bool report(const Row& row, const Sequence& expected) {
  const auto start = std::chrono::steady_clock::now();
  const Sequence got = run(expected, row.attention);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::vector<double> errors = {error(got.out, expected.out), error(got.dq, expected.dq),
                                      error(got.dk, expected.dk), error(got.dv, expected.dv)};
  const bool matches = std::all_of(errors.begin(), errors.end(), [](double e) { return e <= kTolerance; });
  std::printf("%-30s %9.1e %9.1e %9.1e %9.1e %6.1f s  %s\n", row.name.c_str(), errors[0], errors[1], errors[2],
              errors[3], seconds, matches ? "right" : "wrong, and no error was raised");
  return matches == row.must_match;
}

}  // namespace

int main() {
  ulysses::register_backend("sdpa", std::make_shared<SdpaProcessor>());
  std::printf("S = %ld, H = %ld, H_kv = %ld, D = %ld on %ld thread ranks, forward and backward, float32.\n", kSeqLen,
              kHeads, kKvHeads, kHeadDim, kRanks);
  std::printf("Computing the float64 answer on one rank ...\n\n");
  Sequence expected = make_sequence();
  add_reference(expected);

  std::printf("%-30s %9s %9s %9s %9s\n", "largest error of", "out", "dq", "dk", "dv");
  const std::vector<Row> rows = {
      {"ulysses", true, with_options("ulysses", "ulysses")},
      {"allgather_kv", true, with_options("ulysses", "allgather_kv")},
      {"SdpaProcessor, ulysses", true, with_options("sdpa", "ulysses")},
      {"local K/V (the common mistake)", false,
       [](const auto& q, const auto& k, const auto& v, const Group&, const auto&) {
         return sdpa(q, k, v, /*is_causal=*/false, {});
       }},
  };
  bool as_expected = true;
  for (const Row& row : rows) as_expected = report(row, expected) && as_expected;
  std::printf("\nTolerance %.0e. %s\n", kTolerance,
              as_expected ? "Every run is as it must be." : "FAILED: a run is not as it must be.");
  return as_expected ? 0 : 1;
}
