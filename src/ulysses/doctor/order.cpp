#include "ulysses/doctor/order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "ulysses/base/text.h"

namespace ulysses::doctor {
namespace {

using base::cat;
using Numbers = std::vector<int64_t>;

// Directions of length 28: q·k·scale is at least 20 larger for the own token than for any other.
at::Tensor directions(int64_t count, int64_t size) {
  constexpr double kLength = 28.0;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const at::Tensor drawn = at::randn({count, size}, generator, at::TensorOptions(at::kFloat));
  return drawn / drawn.norm(2, -1, true) * kLength;
}

struct Place {
  int64_t batch = 0, token = 0, head = 0;
  bool operator==(const Place&) const = default;
};

std::string text(const Place& place) {
  return cat("token ", place.token, ", head ", place.head, place.batch > 0 ? cat(", sequence ", place.batch) : "");
}

// Where the value at a place came from, for every place that holds a whole number; the rest is no matter of order.
struct Map {
  std::vector<std::pair<Place, Place>> moved;  // (place, origin)
  bool is_whole = true;
};

Map read_map(const Case& c, const at::Tensor& out) {
  Map map;
  const at::Tensor rows = out.contiguous();
  const auto* data = rows.const_data_ptr<double>();
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < c.seq_len(); ++i) {
      for (int64_t h = 0; h < c.num_heads; ++h) {
        const double* row = data + ((b * c.seq_len() + i) * c.num_heads + h) * c.value_head_dim;
        const Place place{b, i, h};
        const Place own{b, i % c.kv_seq_len(), h / (c.num_heads / c.num_kv_heads)};
        Place origin{std::llround(row[2]), std::llround(row[0]), std::llround(row[1])};
        for (int64_t d = 0; d < 3; ++d) map.is_whole = map.is_whole && std::abs(row[d] - std::round(row[d])) < 0.1;
        if (!map.is_whole) return map;
        if (origin != own) map.moved.emplace_back(place, origin);
      }
    }
  }
  return map;
}

Finding describe(const Case& c, const Map& map) {
  const int64_t group = c.num_heads / c.num_kv_heads;
  bool same_batch = true, same_token = true, same_head = true, same_row = true;
  for (const auto& [place, origin] : map.moved) {
    same_batch = same_batch && place.batch == origin.batch;
    same_token = same_token && place.token == origin.token;
    same_head = same_head && place.head / group == origin.head;
    same_row = same_row && origin.token < c.seq_len() && origin.token >= 0 &&
               place.token - c.token_begin(c.rank_of_query(place.token)) ==
                   origin.token - c.token_begin(c.rank_of_query(origin.token));
  }
  const auto& [place, origin] = map.moved.front();
  const std::string held = cat(text(place), " holds what belongs to ", text(origin));
  if (!same_batch) return {"batch_mixed", cat("the sequences of a batch are mixed: ", held), {}};
  if (same_token) return {"head_order", cat("the heads are out of order: ", held), {}};
  if (!same_head) return {"heads_and_tokens", cat("heads and tokens are interchanged: ", held), {}};
  if (same_row)
    return {"rank_order",
            cat("rank ", c.rank_of_query(place.token), " gets the rows of rank ", c.rank_of_query(origin.token), ": ",
                held),
            {}};
  return {"token_order", cat("the tokens are out of order: ", held), {}};
}

}  // namespace

Diagnosis explain_kv_heads(Examiner& examiner, const Case& c) {
  // Where every query head has a KV head of its own, a wrong one is a matter of order.
  if (c.has_extras() || c.num_kv_heads == c.num_heads) return std::nullopt;
  const at::Tensor heads = at::arange(c.num_kv_heads).view({1, 1, -1, 1}).to(at::kFloat);
  const Observation seen =
      examiner.observe(uniform_question(c, heads.expand({c.batch, c.kv_seq_len(), c.num_kv_heads, c.value_head_dim})));
  if (!seen.complete()) return std::nullopt;
  const int64_t group = c.num_heads / c.num_kv_heads;
  for (int64_t h = 0; h < c.num_heads; ++h) {
    for (int64_t i = 0; i < c.seq_len(); ++i) {
      const double read = seen.out[0][i][h][0].item<double>();
      if (!std::isfinite(read)) return std::nullopt;
      if (std::abs(read - static_cast<double>(h / group)) < 0.05) continue;
      const bool whole = std::abs(read - std::round(read)) < 0.05;
      return Finding{
          "kv_heads",
          cat("query head ", h,
              whole ? cat(" reads KV head ", std::llround(read)) : cat(" reads a mix of KV heads (mean ", read, ")"),
              " instead of ", h / group, " (", c.num_heads, " query heads over ", c.num_kv_heads,
              " KV heads, first in token ", i, " on rank ", c.rank_of_query(i), ")"),
          {}};
    }
  }
  return std::nullopt;
}

Diagnosis explain_order(Examiner& examiner, const Case& c) {
  if (c.has_extras()) return std::nullopt;  // no query must then read its own token
  Question question = make_question(c);
  question.c.backward = false;
  const at::ScalarType dtype = question.q.scalar_type();
  const at::Tensor codes = directions(c.kv_seq_len(), c.head_dim);
  const at::Tensor own = codes.index_select(0, at::arange(c.seq_len()).remainder(c.kv_seq_len()));
  question.q = own.view({1, c.seq_len(), 1, -1}).expand_as(question.q).to(dtype).contiguous();
  question.k = codes.view({1, c.kv_seq_len(), 1, -1}).expand_as(question.k).to(dtype).contiguous();
  at::Tensor v = at::zeros(question.v.sizes());
  const auto mark = [&](int64_t column, const at::Tensor& numbers) { v.select(3, column).add_(numbers); };
  mark(0, at::arange(c.kv_seq_len()).view({1, -1, 1}));
  mark(1, at::arange(c.num_kv_heads).view({1, 1, -1}));
  mark(2, at::arange(c.batch).view({-1, 1, 1}));
  question.v = v.to(dtype);
  const Observation seen = examiner.observe(question);
  if (!seen.complete()) return std::nullopt;
  const Map map = read_map(c, seen.out);
  if (!map.is_whole || map.moved.empty()) return std::nullopt;
  return describe(c, map);
}

namespace {

std::string seen_sequence(double number) {
  const bool whole = std::abs(number - std::round(number)) < 0.05;
  return whole ? cat(" sees the values of sequence ", std::llround(number))
               : cat(" sees the values of several sequences (mean number ", number, ")");
}

// v = the number of its sequence: which sequence's values are seen.
Diagnosis explain_batch_of_values(Examiner& examiner, const Case& c) {
  const at::Tensor numbers = at::arange(c.batch).view({-1, 1, 1, 1}).to(at::kFloat);
  const Observation seen = examiner.observe(
      uniform_question(c, numbers.expand({c.batch, c.kv_seq_len(), c.num_kv_heads, c.value_head_dim})));
  if (!seen.complete()) return std::nullopt;
  const at::Tensor rows = (seen.out - numbers.to(at::kDouble)).abs().amax({2, 3});  // [B, S]
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t i = 0; i < c.seq_len(); ++i)
      if (rows[b][i].item<double>() > 0.05)
        return Finding{"batch_mixed",
                       cat("the sequences of a batch are mixed: token ", i, " of sequence ", b,
                           seen_sequence(seen.out[b][i][0][0].item<double>())),
                       {}};
  return std::nullopt;
}

// Other keys in one sequence: the outputs of that one must change, those of the others must not.
Diagnosis explain_batch_of_keys(Examiner& examiner, const Case& c) {
  const Case forward = forward_only(c);
  const Question base = make_question(forward), other = make_question(forward, /*seed=*/2);
  const Observation before = examiner.observe(base);
  for (int64_t changed = 0; changed < c.batch && before.complete(); ++changed) {
    Question question = base;
    question.k = base.k.clone();
    question.k.select(0, changed).copy_(other.k.select(0, changed));
    const Observation after = examiner.observe(question);
    if (!after.complete()) return std::nullopt;
    for (int64_t b = 0; b < c.batch; ++b) {
      const bool moved = (after.out[b] - before.out[b]).abs().max().item<double>() > 0;
      if (moved == (b == changed)) continue;
      return Finding{
          "batch_mixed",
          cat("the sequences of a batch are mixed: the keys of sequence ", changed,
              moved ? " influence the outputs of sequence " : " don't influence the outputs of sequence ", b),
          {}};
    }
  }
  return std::nullopt;
}

}  // namespace

Diagnosis explain_batch(Examiner& examiner, const Case& c) {
  if (c.batch < 2 || c.has_extras()) return std::nullopt;
  if (Diagnosis found = explain_batch_of_values(examiner, c)) return found;
  return explain_batch_of_keys(examiner, c);
}

}  // namespace ulysses::doctor
