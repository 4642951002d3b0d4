// explain_weights: from a table of weights to one sentence.
#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "ulysses/base/text.h"
#include "ulysses/doctor/tensors.h"
#include "ulysses/doctor/weights.h"

namespace ulysses::doctor {
namespace {

using base::cat;
using Numbers = std::vector<int64_t>;

// The table as numbers: the mean over the batch and over the heads that are wrong.
class Table {
 public:
  Table(const Case& c, const Weights& weights) : c_(c), tolerance_(c.dtype.ends_with("16") ? 1e-2 : 1e-4) {
    const at::Tensor wrong = (weights.measured - weights.expected).abs() > tolerance_;
    const at::Tensor heads = wrong.any(3).any(1).any(0).nonzero().flatten();
    finite_ = weights.measured.isfinite().all().item<bool>();
    is_right_ = finite_ && heads.numel() == 0;
    const auto mean = [&](const at::Tensor& x) {
      return (is_right_ ? x : x.index_select(2, heads)).mean({0, 2}).contiguous();
    };
    measured_ = mean(weights.measured);
    expected_ = mean(weights.expected);
  }

  bool is_right() const { return is_right_; }
  bool finite() const { return finite_; }
  const Case& c() const { return c_; }
  double measured(int64_t query, int64_t key) const { return value(measured_, query, key); }
  double expected(int64_t query, int64_t key) const { return value(expected_, query, key); }
  bool is_missing(int64_t query, int64_t key) const {
    return measured(query, key) < tolerance_ && expected(query, key) > tolerance_;
  }
  bool differs(double got, double wanted) const { return std::abs(got - wanted) > tolerance_; }
  Numbers seen(int64_t query) const {
    Numbers keys;
    for (int64_t key = 0; key < c_.kv_seq_len(); ++key)
      if (measured(query, key) > tolerance_) keys.push_back(key);
    return keys;
  }
  Numbers wanted(int64_t query) const {
    Numbers keys;
    for (int64_t key = 0; key < c_.kv_seq_len(); ++key)
      if (expected(query, key) > tolerance_) keys.push_back(key);
    return keys;
  }

 private:
  double value(const at::Tensor& x, int64_t query, int64_t key) const {
    return x.const_data_ptr<double>()[query * c_.kv_seq_len() + key];
  }

  const Case& c_;
  double tolerance_;
  bool is_right_ = false, finite_ = true;
  at::Tensor measured_, expected_;
};

Numbers tokens_of(const Case& c, bool keys, int64_t rank) {
  Numbers tokens;
  const int64_t begin = keys ? c.kv_token_begin(rank) : c.token_begin(rank);
  const int64_t count = (keys ? c.kv_lengths : c.lengths)[static_cast<size_t>(rank)];
  for (int64_t i = begin; i < begin + count; ++i) tokens.push_back(i);
  return tokens;
}

std::string keys_text(const Numbers& keys) {
  return keys.empty() ? "no key" : cat(keys.size() == 1 ? "key " : "keys ", ranges(keys));
}

// How a block of the table (queries of one rank, keys of another) stands: none, some or all of its wanted keys miss.
enum class Block { kEmpty, kPresent, kPartly, kMissing };

Block block(const Table& table, int64_t qr, int64_t kr) {
  int64_t wanted = 0, missing = 0;
  for (const int64_t query : tokens_of(table.c(), false, qr)) {
    for (const int64_t key : tokens_of(table.c(), true, kr)) {
      wanted += table.expected(query, key) > 0;
      missing += table.is_missing(query, key);
    }
  }
  if (wanted == 0) return Block::kEmpty;
  return missing == 0 ? Block::kPresent : missing == wanted ? Block::kMissing : Block::kPartly;
}

std::string missing_text(const Table& table) {
  for (int64_t query = 0; query < table.c().seq_len(); ++query) {
    Numbers keys, queries;
    for (int64_t key = 0; key < table.c().kv_seq_len(); ++key)
      if (table.is_missing(query, key)) keys.push_back(key);
    if (keys.empty()) continue;
    for (int64_t other = query; other < table.c().seq_len(); ++other)
      if (std::all_of(keys.begin(), keys.end(), [&](int64_t key) { return table.is_missing(other, key); }))
        queries.push_back(other);
    return cat(keys_text(keys), keys.size() == 1 ? " never influences queries " : " never influence queries ",
               ranges(queries));
  }
  return "";
}

// Every token sees itself alone: attention ran over the heads of each token.
Diagnosis self_only(const Table& table) {
  const Case& c = table.c();
  if (c.seq_len() < 2 || c.kv_lengths != c.lengths) return std::nullopt;
  for (int64_t query = 0; query < c.seq_len(); ++query)
    if (table.seen(query) != Numbers{query}) return std::nullopt;
  return Finding{"heads_for_tokens",
                 cat("each token attends only to itself, as when [B, S, H, D] is taken for [B, H, S, D]: query 1 sees ",
                     keys_text(table.seen(1)), " instead of ", keys_text(table.wanted(1))),
                 {}};
}

// Which ranks see which: only the own keys, all but the own, or those of a group of ranks.
Diagnosis rank_pattern(const Table& table) {
  const int64_t ranks = table.c().cp_size;
  bool only_own = ranks > 1, all_but_own = ranks > 1, any_missing = false, any_own = false;
  std::set<Numbers> groups;
  for (int64_t qr = 0; qr < ranks; ++qr) {
    Numbers present;
    for (int64_t kr = 0; kr < ranks; ++kr) {
      const Block state = block(table, qr, kr);
      if (state == Block::kEmpty) continue;
      const bool missing = state == Block::kMissing;
      any_missing = any_missing || missing;
      any_own = any_own || qr == kr;
      if (qr == kr ? missing : !missing) only_own = false;
      if (qr == kr ? !missing : missing) all_but_own = false;
      if (!missing) present.push_back(kr);
    }
    if (!present.empty()) groups.insert(present);
  }
  if (!any_missing) return std::nullopt;
  if (only_own)
    return Finding{"local_only", cat("each rank attends only to its own tokens: ", missing_text(table)), {}};
  if (all_but_own && any_own)
    return Finding{"own_left_out", cat("each rank leaves out its own tokens: ", missing_text(table)), {}};
  size_t members = 0;
  std::vector<std::string> names;
  for (const Numbers& group : groups) {
    members += group.size();
    names.push_back(cat("ranks ", ranges(group)));
  }
  if (groups.size() > 1 && members == static_cast<size_t>(ranks) && !table.c().is_causal)
    return Finding{
        "rank_groups", cat(base::join(names, " and "), " attend only among themselves: ", missing_text(table)), {}};
  return std::nullopt;
}

// Keys that no query sees although some should.
Diagnosis dropped_keys(const Table& table) {
  const Case& c = table.c();
  Numbers dropped;
  for (int64_t key = 0; key < c.kv_seq_len(); ++key) {
    bool wanted = false, missing = true;
    for (int64_t query = 0; query < c.seq_len(); ++query) {
      wanted = wanted || table.expected(query, key) > 0;
      missing = missing && (table.is_missing(query, key) || table.expected(query, key) == 0);
    }
    if (wanted && missing) dropped.push_back(key);
  }
  if (dropped.empty()) return std::nullopt;
  const std::string_view never = dropped.size() == 1 ? " never influences any query" : " never influence any query";
  if (dropped.back() == c.kv_seq_len() - 1 && dropped.back() - dropped.front() + 1 == std::ssize(dropped))
    return Finding{"tail_dropped", cat("the tail of the sequence is dropped: ", keys_text(dropped), never), {}};
  return Finding{"missing_keys", cat(keys_text(dropped), never), {}};
}

bool rows_match(const Table& table, const std::function<bool(int64_t query, int64_t key)>& visible) {
  const Case& c = table.c();
  for (int64_t query = 0; query < c.seq_len(); ++query) {
    int64_t count = 0;
    for (int64_t key = 0; key < c.kv_seq_len(); ++key) count += visible(query, key);
    if (count == 0) continue;  // whatever a row that sees nothing gives
    for (int64_t key = 0; key < c.kv_seq_len(); ++key)
      if (table.differs(table.measured(query, key), visible(query, key) ? 1.0 / static_cast<double>(count) : 0))
        return false;
  }
  return true;
}

// Keys that a query sees and keys that it should see, for the first query in which they differ.
std::string seen_text(const Table& table) {
  for (int64_t query = 0; query < table.c().seq_len(); ++query) {
    const Numbers seen = table.seen(query), wanted = table.wanted(query);
    if (seen == wanted) continue;
    const int64_t rank = table.c().rank_of_query(query);
    return cat("query ", query, " (row ", query - table.c().token_begin(rank), " of rank ", rank, ") sees ",
               keys_text(seen), " instead of ", keys_text(wanted));
  }
  return "";
}

Diagnosis causal_pattern(const Table& table) {
  const Case& c = table.c();
  const int64_t shift = c.bottom_right ? c.kv_seq_len() - c.seq_len() : 0;
  const int64_t other_shift = c.kv_seq_len() - c.seq_len() - shift;
  const auto local = [&](int64_t query) { return query - c.token_begin(c.rank_of_query(query)); };
  const auto finding = [&](std::string kind, std::string_view what) {
    return Finding{std::move(kind), cat(what, ": ", seen_text(table)), {}};
  };
  if (!c.is_causal) {
    if (c.window > 0 || !rows_match(table, [](int64_t query, int64_t key) { return key <= query; }))
      return std::nullopt;
    return finding("causal_unasked", "attention is causal although is_causal is not asked for");
  }
  if (rows_match(table, [](int64_t, int64_t) { return true; }))
    return finding("causal_ignored", "is_causal is ignored");
  if (rows_match(table, [&](int64_t query, int64_t key) { return key <= local(query); }))
    return finding("causal_local", "causal by the row's place in its shard, not in the sequence");
  if (other_shift != shift && rows_match(table, [&](int64_t query, int64_t key) { return key <= query + other_shift; }))
    return finding("causal_alignment", c.bottom_right ? "causal is aligned top-left instead of bottom-right"
                                                      : "causal is aligned bottom-right instead of top-left");
  for (const int64_t offset : {-1, 1})
    if (rows_match(table, [&](int64_t query, int64_t key) { return key <= query + shift + offset; }))
      return finding("causal_offset", offset < 0 ? "causal hides a token from itself" : "causal shows the next token");
  return std::nullopt;
}

// Rows whose weights do not add up: something else takes part in the softmax.
Diagnosis lost_weight(const Table& table) {
  const Case& c = table.c();
  for (int64_t query = 0; query < c.seq_len(); ++query) {
    double sum = 0, wanted = 0;
    for (int64_t key = 0; key < c.kv_seq_len(); ++key) {
      sum += table.measured(query, key);
      wanted += table.expected(query, key);
    }
    if (!(sum < wanted - 5e-3)) continue;
    if (c.text_len > 0 && c.mask.empty() && !c.is_causal && !c.sinks && c.text_lens.empty()) {
      const double times = static_cast<double>(c.kv_seq_len()) * (1 / sum - 1) / static_cast<double>(c.text_len);
      return Finding{"text_counts_twice",
                     cat("the replicated text counts ", std::llround(times), " times in the softmax, not once: ",
                         "image keys get ", sum, " of the weight of query ", query, " instead of ", wanted),
                     {}};
    }
    if (c.is_padded())
      return Finding{"padding_counts",
                     cat("padding rows take ", wanted - sum, " of the softmax weight of query ", query, " (",
                         table.seen(query).size(), " real keys)"),
                     {}};
    return std::nullopt;
  }
  return std::nullopt;
}

// Keys that count more than the others of their row.
Diagnosis doubled_keys(const Table& table) {
  const Case& c = table.c();
  for (int64_t query = 0; query < c.seq_len(); ++query) {
    const Numbers keys = table.seen(query);
    if (keys.empty()) continue;
    double light = 2, heavy = 0;
    for (const int64_t key : keys) {
      light = std::min(light, table.measured(query, key));
      heavy = std::max(heavy, table.measured(query, key));
    }
    if (heavy < 1.4 * light) continue;
    Numbers twice;
    for (const int64_t key : keys)
      if (table.measured(query, key) > 1.2 * light) twice.push_back(key);
    const double times = heavy / light;
    const bool whole = std::abs(times - std::round(times)) < 0.05;
    return Finding{"doubled_keys",
                   cat(keys_text(twice), twice.size() == 1 ? " weighs " : " weigh ", whole ? std::round(times) : times,
                       " times as much as the others in query ", query, ": ", heavy, " instead of ",
                       table.expected(query, twice.front())),
                   {}};
  }
  return std::nullopt;
}

}  // namespace

Diagnosis explain_weights(const Case& c, const Weights& weights) {
  if (!weights.measured.defined()) return std::nullopt;
  const Table table(c, weights);
  if (table.is_right()) return std::nullopt;
  if (!table.finite()) {
    const Numbers queries = places(weights.measured.isfinite().logical_not().any(3).any(2).any(0));
    return Finding{"not_finite", cat("the output of queries ", ranges(queries), " is not finite"), {}};
  }
  for (const auto& look : {self_only, causal_pattern, rank_pattern, dropped_keys, lost_weight, doubled_keys})
    if (Diagnosis found = look(table)) return found;
  if (const std::string missing = missing_text(table); !missing.empty()) return Finding{"missing_keys", missing, {}};
  const std::string seen = seen_text(table);
  if (!seen.empty()) return Finding{"leaked_keys", cat("keys leak: ", seen), {}};
  double sum = 0;
  for (int64_t key = 0; key < c.kv_seq_len(); ++key) sum += table.measured(0, key);
  if (table.differs(sum, 1))
    return Finding{"other_weights", cat("the weights of query 0 add up to ", sum, ", not to 1"), {}};
  return Finding{"other_weights", "keys do not weigh alike although all queries and keys are zero", {}};
}

}  // namespace ulysses::doctor
