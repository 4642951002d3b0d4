#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ulysses/contract/attention_spec.h"

namespace ulysses::doctor {

// One call of a context-parallel attention, as data: what the doctor asks, and what `ulysses repro` reads back.
// Options that are not offered anywhere yet are here too: the doctor must see them refused, or be able to check them.
struct Case {
  std::string feature = "equal_shards";  // row of the capability table
  std::string strategy;                  // "" for a target without this argument
  int64_t cp_size = 2;
  int64_t batch = 2;
  std::vector<int64_t> lengths;         // real query tokens per rank
  std::vector<int64_t> padded_lengths;  // query rows per rank
  std::vector<int64_t> kv_lengths;      // key tokens per rank
  int64_t num_heads = 4, num_kv_heads = 4;
  int64_t head_dim = 16, value_head_dim = 16;
  std::string dtype = "float32";
  bool is_causal = false, bottom_right = false;
  double softmax_scale = 0;  // 0: not given, 1 / sqrt(D)
  bool return_lse = false;
  bool backward = true;
  std::string grad_of = "qkv";  // which inputs require a gradient
  bool sum_loss = false;        // the gradient of .sum(): ones, all of them one number in memory
  bool strided = false;         // the shards are views of [B, H, S, D] storage
  double magnitude = 1;         // q is this many times larger: scores far from 0
  int64_t window = 0;           // a query sees this many keys to its left; 0: all

  // "key" [B, S_kv], "key_4d" [B, 1, 1, S_kv], "query" [1, 1, S, S_kv], "head" [1, H, 1, S_kv], "full" [B, H, S, S_kv];
  // "": no mask. S and S_kv count joint tokens.
  std::string mask;
  bool additive_mask = false;  // random numbers on the scaled scores, −inf where a bool mask would be false
  bool mask_grad = false;      // and they require a gradient
  bool blind_rows = false;     // some queries see no key at all
  std::string local_axis;  // "q" or "kv": each rank gets its own rows of this axis; "": the mask is whole everywhere

  int64_t text_len = 0;            // joint tokens, equal on every rank
  bool text_suffix = false;        // behind the sequence instead of in front of it
  std::vector<int64_t> text_lens;  // real ones of each sequence of the batch; empty: all of them
  int64_t num_documents = 1;       // packed sequences of equal length
  double dropout_p = 0;
  bool replicated_kv = false;  // k and v whole on every rank
  bool sinks = false;          // one more logit per head
  double softcap = 0;          // softcap · tanh(scores / softcap); 0: not given
  bool lse_grad = false;       // the loss depends on lse too
  std::string qkv_format = "bshd";
  std::string order = "contiguous";
  int64_t ulysses_degree = 0;  // 0: not given

  int64_t seq_len() const;
  int64_t kv_seq_len() const;
  int64_t token_begin(int64_t rank) const;     // of the rank's queries
  int64_t kv_token_begin(int64_t rank) const;  // of the rank's keys
  int64_t rank_of_query(int64_t token) const;  // the rank that holds it
  double scale() const;                        // the softmax scale that is asked for
  bool has_even_shards() const;  // all shards of one length, nothing padded, q as k and v where these are shards
  bool is_padded() const { return padded_lengths != lengths; }
  bool mask_has_query_axis() const { return mask == "query" || mask == "full"; }
  // Options beyond shapes, heads and causality: what closed forms over plain attention do not foresee.
  bool has_extras() const { return !mask.empty() || text_len > 0 || replicated_kv || sinks || softcap != 0; }

  // "uneven_shards/ulysses/W4/float32/S30-H6:2-causal": unique within the table, for --cases globs.
  std::string id() const;
  bool operator==(const Case&) const = default;
};

// Visits every field by name, in one order, for JSON and for pickling. `visit(name, member)`.
template <typename AnyCase, typename Visit>
void for_each_field(AnyCase& c, Visit&& visit) {
  visit("feature", c.feature);
  visit("strategy", c.strategy);
  visit("cp_size", c.cp_size);
  visit("batch", c.batch);
  visit("lengths", c.lengths);
  visit("padded_lengths", c.padded_lengths);
  visit("kv_lengths", c.kv_lengths);
  visit("num_heads", c.num_heads);
  visit("num_kv_heads", c.num_kv_heads);
  visit("head_dim", c.head_dim);
  visit("value_head_dim", c.value_head_dim);
  visit("dtype", c.dtype);
  visit("is_causal", c.is_causal);
  visit("bottom_right", c.bottom_right);
  visit("softmax_scale", c.softmax_scale);
  visit("return_lse", c.return_lse);
  visit("backward", c.backward);
  visit("grad_of", c.grad_of);
  visit("sum_loss", c.sum_loss);
  visit("strided", c.strided);
  visit("magnitude", c.magnitude);
  visit("window", c.window);
  visit("mask", c.mask);
  visit("additive_mask", c.additive_mask);
  visit("mask_grad", c.mask_grad);
  visit("blind_rows", c.blind_rows);
  visit("local_axis", c.local_axis);
  visit("text_len", c.text_len);
  visit("text_suffix", c.text_suffix);
  visit("text_lens", c.text_lens);
  visit("num_documents", c.num_documents);
  visit("dropout_p", c.dropout_p);
  visit("replicated_kv", c.replicated_kv);
  visit("sinks", c.sinks);
  visit("softcap", c.softcap);
  visit("lse_grad", c.lse_grad);
  visit("qkv_format", c.qkv_format);
  visit("order", c.order);
  visit("ulysses_degree", c.ulysses_degree);
}

// The part of an id that names mask, text, replicated keys, sinks, softcap, lse gradient and format: "-key_mask-sinks".
std::string extras_text(const Case& c);

// The same case without gradients.
Case forward_only(Case c);

// Shards: `per_rank` tokens on each of cp_size ranks; or the given ones. q, k and v alike, nothing padded.
void set_shards(Case& c, int64_t per_rank);
void set_shards(Case& c, std::vector<int64_t> lengths);

// Without a mask, or without joint tokens: the fields that describe them as in a plain case.
void clear_mask(Case& c);
void clear_text(Case& c);
// One sequence, or the first `batch` of them.
void set_batch(Case& c, int64_t batch);

// What a mask's axes stand for, in the words of MaskLayout. `ambiguous`: on some rank the sizes allow another reading,
// so that our own call must be told; the same on every rank.
struct MaskWords {
  std::string q, kv;
  bool ambiguous = false;
};
MaskWords mask_words(const Case& c);

// Why the fields make no case, empty if they do: sizes that are not positive, lengths that don't fit cp_size.
std::string problem_of(const Case& c);

// The options of our own operation that this case asks for, apart from tensors; the layout only where shards are not
// all equal.
contract::AttentionOptions options_of(const Case& c);

}  // namespace ulysses::doctor
