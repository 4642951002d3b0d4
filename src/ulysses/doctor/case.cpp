#include "ulysses/doctor/case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ulysses/base/text.h"

namespace ulysses::doctor {
namespace {

using base::cat;
using contract::Feature;

int64_t total(const std::vector<int64_t>& lengths, size_t count) {
  return std::accumulate(lengths.begin(), lengths.begin() + static_cast<int64_t>(count), int64_t{0});
}

}  // namespace

int64_t Case::seq_len() const { return total(lengths, lengths.size()); }
int64_t Case::kv_seq_len() const { return total(kv_lengths, kv_lengths.size()); }
int64_t Case::token_begin(int64_t rank) const { return total(lengths, static_cast<size_t>(rank)); }
int64_t Case::kv_token_begin(int64_t rank) const { return total(kv_lengths, static_cast<size_t>(rank)); }

int64_t Case::rank_of_query(int64_t token) const {
  int64_t rank = 0;
  while (rank + 1 < cp_size && token >= token_begin(rank + 1)) ++rank;
  return rank;
}

double Case::scale() const {
  return softmax_scale != 0 ? softmax_scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
}

bool Case::has_even_shards() const {
  const auto is_first = [&](int64_t length) { return length == lengths.front(); };
  return std::all_of(lengths.begin(), lengths.end(), is_first) && !is_padded() && kv_lengths == lengths;
}

std::string Case::id() const {
  std::string shape = cat("S", seq_len(), "-H", num_heads);
  if (num_kv_heads != num_heads) shape += cat(":", num_kv_heads);
  if (kv_lengths != lengths) shape += cat("-Skv", kv_seq_len());
  if (head_dim != 16) shape += cat("-D", head_dim);
  if (value_head_dim != head_dim) shape += cat("-Dv", value_head_dim);
  shape += cat("-B", batch);
  if (is_causal) shape += bottom_right ? "-bottom_right" : "-causal";
  if (return_lse) shape += "-lse";
  if (strided) shape += "-strided";
  if (!backward) shape += "-forward";
  if (grad_of != "qkv") shape += "-grad_" + grad_of;
  if (sum_loss) shape += "-sum";
  if (magnitude != 1) shape += cat("-x", magnitude);
  return cat(feature, "/", strategy.empty() ? "" : strategy + "/", "W", cp_size, "/", dtype, "/", shape);
}

Case forward_only(Case c) {
  c.backward = false;
  return c;
}

void set_shards(Case& c, int64_t per_rank) {
  set_shards(c, std::vector<int64_t>(static_cast<size_t>(c.cp_size), per_rank));
}

void set_shards(Case& c, std::vector<int64_t> lengths) {
  c.padded_lengths = lengths;
  c.kv_lengths = lengths;
  c.lengths = std::move(lengths);
}

std::string problem_of(const Case& c) {
  const auto ranks = static_cast<size_t>(c.cp_size);
  if (c.cp_size < 1 || c.lengths.size() != ranks || c.padded_lengths.size() != ranks || c.kv_lengths.size() != ranks)
    return cat("lengths, padded_lengths and kv_lengths must have cp_size=", c.cp_size, " entries");
  constexpr int64_t kMaxTokens = 1 << 20;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (std::max({c.lengths[rank], c.padded_lengths[rank], c.kv_lengths[rank]}) > kMaxTokens)
      return cat("rank ", rank, " has more than ", kMaxTokens, " tokens: the doctor's cases are small");
    if (c.lengths[rank] < 0 || c.kv_lengths[rank] < 0 || c.padded_lengths[rank] < c.lengths[rank])
      return cat("the lengths of rank ", rank, " are negative, or longer than its padded length");
  }
  if (std::min({c.batch, c.num_heads, c.num_kv_heads, c.head_dim, c.value_head_dim, c.num_documents}) < 1)
    return "batch, heads, head sizes and documents must be positive";
  if (c.num_heads % c.num_kv_heads != 0)
    return cat("num_heads=", c.num_heads, " is no multiple of num_kv_heads=", c.num_kv_heads);
  if (c.masked_keys < 0 || c.masked_keys > c.kv_seq_len() || c.window < 0 || c.text_len < 0)
    return cat("masked_keys, window and text_len must not be negative, and masked_keys not above ", c.kv_seq_len());
  if (c.num_documents > std::max<int64_t>(1, c.seq_len()))
    return cat("num_documents=", c.num_documents, " is more than the ", c.seq_len(), " tokens");
  if (!(c.dropout_p >= 0 && c.dropout_p < 1)) return cat("dropout_p=", c.dropout_p, " is not in [0, 1)");
  constexpr int64_t kMaxElements = int64_t{1} << 26;
  const int64_t tokens = std::max(c.seq_len(), c.kv_seq_len());
  const int64_t scores = tokens > 1 << 13 ? kMaxElements : c.batch * c.num_heads * c.seq_len() * c.kv_seq_len();
  if (scores >= kMaxElements || c.batch * c.num_heads * c.head_dim * tokens > kMaxElements)
    return cat(tokens, " tokens are more than one process compares: the doctor's cases are small");
  return "";
}

contract::AttentionOptions options_of(const Case& c) {
  contract::AttentionOptions options;
  options.strategy = c.strategy.empty() ? "ulysses" : c.strategy;
  options.agreement = "always";
  options.is_causal = c.is_causal;
  options.causal_alignment = c.bottom_right ? "bottom_right" : "top_left";
  options.return_lse = c.return_lse;
  options.qkv_format = c.qkv_format;
  options.kv_role = c.replicated_kv ? "replicated" : "sharded";
  if (c.softmax_scale != 0) options.softmax_scale = c.softmax_scale;
  if (!c.has_even_shards() || c.order != "contiguous") {
    options.layout = contract::LayoutSpec{c.lengths, c.padded_lengths, std::nullopt, c.order};
    if (c.kv_lengths != c.lengths)
      options.kv_layout = contract::LayoutSpec{c.kv_lengths, c.kv_lengths, std::nullopt, c.order};
  }
  const auto request = [&](Feature feature, bool asked) {
    if (asked) options.requested.push_back(feature);
  };
  request(Feature::kWindow, c.window != 0);
  request(Feature::kAttnMask, c.masked_keys != 0);
  request(Feature::kJointTokens, c.text_len != 0);
  request(Feature::kPackedSequences, c.num_documents != 1);
  request(Feature::kDropout, c.dropout_p != 0);
  request(Feature::kHybridDegree, c.ulysses_degree != 0);
  return options;
}

}  // namespace ulysses::doctor
