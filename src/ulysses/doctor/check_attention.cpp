#include "ulysses/doctor/check_attention.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <optional>

#include "ulysses/base/text.h"
#include "ulysses/doctor/oracle.h"
#include "ulysses/exchange/token_gather.h"

namespace ulysses::doctor {
namespace {

using base::cat;
using exchange::Group;

constexpr double kTolerance = 1e-4;  // float32, and a wrong recipe errs by 1e-2 and more
constexpr int64_t kBatch = 2;        // two sequences: gathering along the wrong dimension is right for one
constexpr double kCoarse = 2e-2;     // as far off as 16-bit arithmetic inside the call makes it
constexpr double kShareTolerance = 5e-3;

// The sequence that every rank knows, and this rank's part of it.
struct Probe {
  const AttentionFunction& attention;
  const Group& group;
  int64_t shard_len, num_heads, seq_len, head_dim;
  bool is_causal;

  at::Tensor shard(const at::Tensor& x) const { return x.narrow(1, group.rank() * shard_len, shard_len).contiguous(); }
  at::Tensor gather(const at::Tensor& x) const {
    const std::vector<int64_t> lengths(static_cast<size_t>(group.size()), shard_len);
    return exchange::gather_sequence(x.detach().to(at::kCPU).to(at::kDouble), lengths, 1, group);
  }
  std::string tokens(int64_t first_shard, int64_t last_shard) const {
    return cat(first_shard * shard_len, "–", (last_shard + 1) * shard_len - 1);
  }
};

// What the call returned on this rank, or what keeps it from being compared; the same answer on every rank.
struct Answer {
  at::Tensor local;   // with its graph
  at::Tensor global;  // gathered, float64
  std::string problem;
};

Answer ask(const Probe& probe, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  Answer answer;
  std::string mine;
  try {
    answer.local = probe.attention(q, k, v);
    if (answer.local.sizes() != q.sizes()) mine = cat("it returns shape ", answer.local.sizes(), " for q ", q.sizes());
  } catch (const std::exception& error) {
    const std::string_view text = error.what();  // of a Python error: its traceback follows
    mine = cat("it raised: ", text.substr(0, text.find('\n')));
  }
  const auto texts = probe.group.gather_texts(mine);
  for (size_t rank = 0; rank < texts.size() && answer.problem.empty(); ++rank)
    if (!texts[rank].empty()) answer.problem = cat("rank ", rank, ": ", texts[rank]);
  if (!answer.problem.empty()) return answer;
  answer.global = probe.gather(answer.local);
  if (!answer.global.isfinite().all().item<bool>()) answer.problem = "the output is not finite";
  return answer;
}

std::string describe_reach(const Probe& probe, const at::Tensor& weights, const at::Tensor& expected) {
  const int64_t ranks = probe.group.size();
  const auto* weight = weights.const_data_ptr<double>();
  const auto* share = expected.const_data_ptr<double>();
  std::optional<std::pair<int64_t, int64_t>> missing, heavy;
  bool local_only = ranks > 1, only_later_missing = true;
  for (int64_t query = 0; query < ranks; ++query) {
    for (int64_t key = 0; key < ranks; ++key) {
      const double value = weight[query * ranks + key];
      const double wanted = share[query * ranks + key];
      const bool is_missing = std::abs(value) < kTolerance && wanted > kTolerance;
      local_only = local_only && std::abs(value - (query == key ? 1.0 : 0.0)) < kTolerance;
      only_later_missing = only_later_missing && is_missing == (key > query);
      if (is_missing && !missing) missing = {key, query};
      if (value > wanted * (1.0 + kShareTolerance) + kTolerance && !heavy) heavy = {key, query};
    }
  }
  if (missing) {
    const std::string pair = cat("keys ", probe.tokens(missing->first, missing->first), " never reach queries ",
                                 probe.tokens(missing->second, missing->second));
    if (local_only) return cat("each rank attends only to its own tokens: ", pair);
    return only_later_missing ? cat(pair, ", as in causal attention: if it is meant to be causal, pass is_causal=True")
                              : pair;
  }
  if (!heavy) return "";
  const int64_t at = heavy->second * ranks + heavy->first;
  const std::string_view reason = share[at] < kTolerance ? ": causal attention must not see later tokens"
                                                         : ": some keys count more than once, or others are dropped";
  return cat("keys ", probe.tokens(heavy->first, heavy->first), " weigh ", weight[at], " in queries ",
             probe.tokens(heavy->second, heavy->second), " instead of ", share[at], reason);
}

// q = k = 0: a row is the plain mean of the values it sees. Column d of v marks the keys of shard d, so column d of
// the output is the weight of that shard, which must be 1 / W, or what the causal mean gives.
std::string reach_problem(const Probe& probe) {
  const int64_t ranks = probe.group.size();
  const at::Tensor zeros = at::zeros({1, probe.seq_len, probe.num_heads, probe.head_dim});
  const at::Tensor marks = at::eye(probe.head_dim).narrow(0, 0, ranks).repeat_interleave(probe.shard_len, 0);
  const at::Tensor v = marks.view({1, probe.seq_len, 1, probe.head_dim}).expand_as(zeros);
  const Answer answer = ask(probe, probe.shard(zeros), probe.shard(zeros), probe.shard(v));
  if (!answer.problem.empty()) return answer.problem;
  const at::Tensor expected = oracle_attention(zeros, zeros, v, probe.is_causal, 1.0);
  // [query shard, key shard]: mean weight over the shard's queries and all heads
  const auto shard_weights = [&](const at::Tensor& out) {
    return out.narrow(3, 0, ranks).reshape({ranks, -1, ranks}).mean(1).contiguous();
  };
  return describe_reach(probe, shard_weights(answer.global), shard_weights(expected));
}

// q_i = k_i = a long unit vector: row i returns v_i, so a row that returns v_j shows where it came from.
std::string order_problem(const Probe& probe) {
  const at::Tensor unit = at::eye(probe.seq_len, probe.head_dim).mul(12.0 * std::sqrt(std::sqrt(probe.head_dim)));
  const at::Tensor q = unit.view({1, probe.seq_len, 1, -1}).expand({1, probe.seq_len, probe.num_heads, -1});
  const at::Tensor head = at::arange(probe.num_heads).mul(probe.seq_len).view({1, 1, -1, 1});
  const at::Tensor v = at::arange(probe.seq_len).view({1, -1, 1, 1}).add(head).to(at::kFloat).expand_as(q);
  const Answer answer = ask(probe, probe.shard(q), probe.shard(q), probe.shard(v));
  if (!answer.problem.empty()) return answer.problem;
  const at::Tensor rows = answer.global.select(3, 0).squeeze(0).contiguous();  // [S, H]
  for (int64_t token = 0; token < probe.seq_len; ++token) {
    for (int64_t h = 0; h < probe.num_heads; ++h) {
      const double value = rows.const_data_ptr<double>()[token * probe.num_heads + h];
      const auto got = static_cast<int64_t>(std::llround(value));
      if (std::abs(value - static_cast<double>(h * probe.seq_len + token)) < 0.1) continue;
      const bool is_a_row = std::abs(value - static_cast<double>(got)) < 0.1;
      if (!is_a_row || got < 0 || got >= probe.num_heads * probe.seq_len) return "";  // wrong, but not by its place
      return cat("the output is out of order: row ", token, ", head ", h, " holds what belongs to row ",
                 got % probe.seq_len, ", head ", got / probe.seq_len);
    }
  }
  return "";
}

double largest_error(const at::Tensor& got, const at::Tensor& wanted) {
  return (got - wanted).abs().max().item<double>();
}

bool wrong(double error, const at::Tensor& wanted, double tolerance = kTolerance) {
  return !(error <= tolerance * std::max(1.0, wanted.abs().max().item<double>()));  // NaN is wrong
}

std::string scale_problem(const Probe& probe, const at::Tensor& out, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v) {
  const auto d = static_cast<double>(probe.head_dim);
  for (const auto& [name, scale] :
       {std::pair{"1", 1.0}, std::pair{"1 / D", 1.0 / d}, std::pair{"sqrt(D)", std::sqrt(d)}})
    if (!wrong(largest_error(out, oracle_attention(q, k, v, probe.is_causal, scale)), out))
      return cat("the softmax scale is ", name, " instead of 1 / sqrt(D)");
  const at::Tensor wanted = oracle_attention(q, k, v, probe.is_causal, 1.0 / std::sqrt(d));
  if (!wrong(largest_error(out, wanted), wanted, kCoarse))
    return "the values are right only as far as 16-bit arithmetic goes: the call gets float32 and must compute in it";
  // reach and order were asked for one sequence; here there are two.
  const auto first = [](const at::Tensor& x) { return x.narrow(0, 0, 1); };
  const Answer alone = ask(probe, probe.shard(first(q)), probe.shard(first(k)), probe.shard(first(v)));
  if (alone.problem.empty() && !wrong(largest_error(alone.global, first(wanted)), wanted))
    return "the sequences of a batch are mixed: one alone is right, two are wrong";
  return "the values are wrong, although every key reaches every query in order";
}

// c if got ≈ c · wanted, else nothing.
std::optional<double> factor(const at::Tensor& got, const at::Tensor& wanted) {
  const double c = (got * wanted).sum().item<double>() / (wanted * wanted).sum().item<double>();
  if (!std::isfinite(c) || wrong(largest_error(got, wanted * c), wanted)) return std::nullopt;
  return c;
}

std::string gradient_problem(std::string_view name, const at::Tensor& got, const at::Tensor& wanted, double error) {
  if (!wrong(error, wanted)) return "";
  if (const auto c = factor(got, wanted)) return cat("the gradient of ", name, " is ", *c, " times what it must be");
  return cat("the gradient of ", name, " is wrong by ", error,
             name == "q" ? "" : ": it must be summed over the queries of every rank");
}

void check_values(const Probe& probe, AttentionCheck& check) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto draw = [&] {
    return at::randn({kBatch, probe.seq_len, probe.num_heads, probe.head_dim}, generator,
                     at::TensorOptions(at::kFloat));
  };
  const at::Tensor q = draw(), k = draw(), v = draw(), grad_out = draw();
  const double scale = 1.0 / std::sqrt(static_cast<double>(probe.head_dim));
  const OracleGrads oracle = oracle_gradients(grad_out, q, k, v, probe.is_causal, scale);

  const at::AutoGradMode enabled(true);
  const auto leaf = [&](const at::Tensor& x) { return probe.shard(x).requires_grad_(true); };
  const at::Tensor q_local = leaf(q), k_local = leaf(k), v_local = leaf(v);
  const Answer answer = ask(probe, q_local, k_local, v_local);
  if (!answer.problem.empty()) {
    check.diagnosis = answer.problem;
    return;
  }
  check.forward_error = largest_error(answer.global, oracle.out);
  if (wrong(check.forward_error, oracle.out)) {
    check.diagnosis = scale_problem(probe, answer.global, q, k, v);
    return;
  }
  if (!answer.local.requires_grad()) {
    check.diagnosis = "the output carries no gradient: backward would train nothing";
    return;
  }
  torch::autograd::backward({answer.local}, {probe.shard(grad_out).to(answer.local.scalar_type())});
  const auto grad = [&](const at::Tensor& x) {
    return probe.gather(x.grad().defined() ? x.grad() : at::zeros(x.sizes(), x.options()));
  };
  const at::Tensor dq = grad(q_local), dk = grad(k_local), dv = grad(v_local);
  check.dq_error = largest_error(dq, oracle.dq);
  check.dk_error = largest_error(dk, oracle.dk);
  check.dv_error = largest_error(dv, oracle.dv);
  check.diagnosis = gradient_problem("v", dv, oracle.dv, check.dv_error);
  if (check.diagnosis.empty()) check.diagnosis = gradient_problem("k", dk, oracle.dk, check.dk_error);
  if (check.diagnosis.empty()) check.diagnosis = gradient_problem("q", dq, oracle.dq, check.dq_error);
  if (check.diagnosis.empty()) check.diagnosis = "ok";
}

}  // namespace

std::string AttentionCheck::text() const {
  const auto number = [](double error) { return error < 0 ? std::string("not reached") : cat(error); };
  return cat(diagnosis, " (largest error: out ", number(forward_error), ", dq ", number(dq_error), ", dk ",
             number(dk_error), ", dv ", number(dv_error), ")");
}

AttentionCheck check_attention(const AttentionFunction& attention, const Group& group, bool is_causal,
                               int64_t shard_len, int64_t num_heads) {
  const int64_t seq_len = shard_len * group.size();
  const Probe probe{attention, group, shard_len, num_heads, seq_len, std::max<int64_t>(16, seq_len), is_causal};
  AttentionCheck check;
  {
    const at::AutoGradMode disabled(false);
    check.diagnosis = reach_problem(probe);
    if (check.diagnosis.empty()) check.diagnosis = order_problem(probe);
  }
  if (check.diagnosis.empty()) check_values(probe, check);
  return check;
}

}  // namespace ulysses::doctor
