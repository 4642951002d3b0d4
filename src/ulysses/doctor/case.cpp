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

// How many readings the size of one axis of a mask has on one rank, as the operation reads it.
int64_t count_readings(int64_t got, int64_t local, int64_t global, bool can_broadcast, int64_t cp_size) {
  const bool broadcast = can_broadcast && got == 1;
  const bool is_global = !broadcast && got == global;
  const bool is_local = got == local && !(cp_size == 1 && (broadcast || is_global));
  return static_cast<int64_t>(broadcast) + static_cast<int64_t>(is_global) + static_cast<int64_t>(is_local);
}

std::string mask_problem(const Case& c) {
  constexpr std::string_view kKinds[] = {"", "key", "key_4d", "query", "head", "full"};
  if (std::find(std::begin(kKinds), std::end(kKinds), c.mask) == std::end(kKinds))
    return cat("mask=", c.mask, " is none of key, key_4d, query, head, full");
  if (c.mask.empty() && (c.additive_mask || c.mask_grad || c.blind_rows || !c.local_axis.empty()))
    return "additive_mask, mask_grad, blind_rows and local_axis need a mask";
  if (c.mask_grad && !c.additive_mask) return "mask_grad needs additive_mask";
  if (c.local_axis.empty()) return "";
  if (c.local_axis != "kv" && !(c.local_axis == "q" && c.mask_has_query_axis()))
    return cat("local_axis=", c.local_axis, " is neither kv nor q of a mask with a query axis");
  if (c.text_len > 0 || (c.local_axis == "kv" && c.replicated_kv)) return "no rank has such an axis of its own";
  return "";
}

std::string text_problem(const Case& c) {
  if (c.text_len < 0) return "text_len must not be negative";
  if (c.text_len == 0) return c.text_suffix || !c.text_lens.empty() ? "text_suffix and text_lens need text_len" : "";
  if (c.num_documents != 1) return "num_documents and text_len: nobody says which document the text belongs to";
  if (c.text_lens.empty()) return "";
  const auto [least, most] = std::minmax_element(c.text_lens.begin(), c.text_lens.end());
  if (std::ssize(c.text_lens) != c.batch || *least < 0 || *most > c.text_len)
    return cat("text_lens must be ", c.batch, " numbers from 0 to ", c.text_len);
  return "";
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
  const bool same_keys = replicated_kv || kv_lengths == lengths;
  return std::all_of(lengths.begin(), lengths.end(), is_first) && !is_padded() && same_keys;
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
  shape += extras_text(*this);
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

std::string extras_text(const Case& c) {
  std::string text;
  if (!c.mask.empty()) text += cat("-", c.mask, c.additive_mask ? "_bias" : "_mask");
  if (!c.local_axis.empty()) text += "-local_" + c.local_axis;
  if (c.blind_rows) text += "-blind";
  if (c.mask_grad) text += "-grad_mask";
  if (c.text_len > 0) text += cat(c.text_suffix ? "-suffix" : "-text", c.text_len);
  if (!c.text_lens.empty()) text += cat("-real", base::join(c.text_lens, "_"));
  if (c.replicated_kv) text += "-replicated";
  if (c.sinks) text += "-sinks";
  if (c.softcap != 0) text += cat("-cap", c.softcap);
  if (c.lse_grad) text += "-grad_lse";
  if (c.qkv_format != "bshd") text += "-" + c.qkv_format;
  return text;
}

void clear_mask(Case& c) {
  c.mask = c.local_axis = "";
  c.additive_mask = c.mask_grad = c.blind_rows = false;
}

void clear_text(Case& c) {
  c.text_len = 0;
  c.text_suffix = false;
  c.text_lens.clear();
}

void set_batch(Case& c, int64_t batch) {
  c.batch = batch;
  if (!c.text_lens.empty()) c.text_lens.resize(static_cast<size_t>(batch), c.text_len);
}

MaskWords mask_words(const Case& c) {
  MaskWords words;
  if (c.mask.empty()) return words;
  words.q = c.local_axis == "q" ? "local" : c.mask_has_query_axis() ? "global" : "broadcast";
  words.kv = c.local_axis == "kv" ? "local" : "global";
  const int64_t queries = c.seq_len() + c.text_len, keys = c.kv_seq_len() + c.text_len;
  for (size_t rank = 0; rank < c.lengths.size(); ++rank) {
    constexpr int64_t kNone = -1;  // joint tokens belong to no rank, replicated keys to all
    const int64_t own_queries = c.text_len > 0 ? kNone : c.padded_lengths[rank];
    const int64_t padding = c.kv_lengths == c.lengths ? c.padded_lengths[rank] - c.lengths[rank] : 0;
    const int64_t own_keys = c.text_len > 0 || c.replicated_kv ? kNone : c.kv_lengths[rank] + padding;
    const int64_t got_q = words.q == "local" ? own_queries : words.q == "global" ? queries : 1;
    const int64_t got_kv = words.kv == "local" ? own_keys : keys;
    words.ambiguous = words.ambiguous || count_readings(got_q, own_queries, queries, true, c.cp_size) > 1 ||
                      count_readings(got_kv, own_keys, keys, false, c.cp_size) > 1 ||
                      (c.mask == "key" && c.batch > 1 && (c.batch == own_queries || c.batch == queries));
  }
  return words;
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
  if (c.window < 0 || c.softcap < 0) return "window and softcap must not be negative";
  if (c.lse_grad && !c.return_lse) return "lse_grad needs return_lse";
  if (const std::string problem = mask_problem(c); !problem.empty()) return problem;
  if (const std::string problem = text_problem(c); !problem.empty()) return problem;
  if (c.num_documents > std::max<int64_t>(1, c.seq_len()))
    return cat("num_documents=", c.num_documents, " is more than the ", c.seq_len(), " tokens");
  if (!(c.dropout_p >= 0 && c.dropout_p < 1)) return cat("dropout_p=", c.dropout_p, " is not in [0, 1)");
  constexpr int64_t kMaxElements = int64_t{1} << 26;
  const int64_t tokens = std::max(c.seq_len(), c.kv_seq_len()) + c.text_len;
  const int64_t scores = tokens > 1 << 13 ? kMaxElements : c.batch * c.num_heads * tokens * tokens;
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
  if (c.softcap != 0) options.softcap = c.softcap;
  options.policy.output_restore_dim = contract::sequence_dim(c.qkv_format);
  options.joint_len = c.text_len;
  if (c.text_suffix) options.joint_position = "suffix";
  options.joint_valid_lens = c.text_lens;
  if (const MaskWords words = mask_words(c); words.ambiguous) {
    options.mask_q = words.q;
    options.mask_kv = words.kv;
  }
  if (!c.has_even_shards() || c.order != "contiguous") {
    options.layout = contract::LayoutSpec{c.lengths, c.padded_lengths, std::nullopt, c.order};
    if (c.kv_lengths != c.lengths && !c.replicated_kv)
      options.kv_layout = contract::LayoutSpec{c.kv_lengths, c.kv_lengths, std::nullopt, c.order};
  }
  const auto request = [&](Feature feature, bool asked) {
    if (asked) options.requested.push_back(feature);
  };
  request(Feature::kWindow, c.window != 0);
  request(Feature::kPackedSequences, c.num_documents != 1);
  request(Feature::kDropout, c.dropout_p != 0);
  request(Feature::kHybridDegree, c.ulysses_degree != 0);
  return options;
}

}  // namespace ulysses::doctor
