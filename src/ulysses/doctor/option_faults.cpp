// explain_options: hypotheses about the output.
#include "ulysses/doctor/option_faults.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ulysses/base/text.h"
#include "ulysses/doctor/tensors.h"
#include "ulysses/doctor/weights.h"

namespace ulysses::doctor {
namespace {

using base::cat;

constexpr double kInf = std::numeric_limits<double>::infinity();

bool is_bool(const Case& c) { return !c.mask.empty() && !c.additive_mask; }

// Puts another mask in the place of the question's; a bool one hides, another is added.
void set_mask(Question& question, const at::Tensor& mask) {
  question.mask = mask;
  question.c.mask = "full";
  question.c.additive_mask = mask.is_floating_point();
  question.c.mask_grad = question.c.blind_rows = false;
  question.c.local_axis = "";
}

// Hides keys, whatever the question's mask does: [1, 1, queries | 1, keys] bool, false = hidden.
void hide(Question& question, const at::Tensor& visible) {
  if (!question.mask.defined()) return set_mask(question, visible);
  const at::Tensor mask = four_dimensions(question.mask);
  if (mask.scalar_type() == at::kBool) return set_mask(question, mask & visible);
  set_mask(question, mask.masked_fill(visible.logical_not(), -kInf));
}

at::Tensor query_places(const Case& c) { return at::arange(c.seq_len() + c.text_len).view({1, 1, -1, 1}); }
at::Tensor key_places(const Case& c) { return at::arange(c.kv_seq_len() + c.text_len).view({1, 1, 1, -1}); }

// Columns of the rank's own keys.
at::Tensor own_keys(const Case& c, const at::Tensor& mask, int64_t rank) {
  return mask.narrow(mask.dim() - 1, c.kv_token_begin(rank), c.kv_lengths[static_cast<size_t>(rank)]);
}

at::Tensor lets_through(const at::Tensor& mask) {
  return mask.scalar_type() == at::kBool ? at::ones_like(mask) : at::zeros_like(mask);
}

// ---- what a rank makes of the question: `rank` is the one whose rows are read

void mask_as_bias(Question& question, int64_t) { set_mask(question, four_dimensions(question.mask).to(at::kDouble)); }

void mask_inverted(Question& question, int64_t) { set_mask(question, four_dimensions(question.mask).logical_not()); }

void first_rows_of_mask(Question& question, int64_t rank) {
  const Case& c = question.c;
  const int64_t begin = c.token_begin(rank);
  at::Tensor mask = four_dimensions(question.mask).clone();
  mask.narrow(2, begin, mask.size(2) - begin).copy_(mask.narrow(2, 0, mask.size(2) - begin).clone());
  set_mask(question, mask);
}

// Heads h, h + H / W, … all read the mask of head h: that of the first rank's heads.
void first_heads_of_mask(Question& question, int64_t) {
  const Case& c = question.c;
  const at::Tensor heads = at::arange(c.num_heads).remainder(c.num_heads / c.cp_size);
  set_mask(question, four_dimensions(question.mask).index_select(1, heads));
}

void own_part_for_own_keys(Question& question, int64_t rank) {
  const at::Tensor whole = four_dimensions(question.mask), mask = lets_through(whole);
  own_keys(question.c, mask, rank).copy_(own_keys(question.c, whole, rank));
  set_mask(question, mask);
}

void own_part_for_first_keys(Question& question, int64_t rank) {
  const at::Tensor whole = four_dimensions(question.mask), mask = lets_through(whole);
  const at::Tensor part = own_keys(question.c, whole, rank);
  mask.narrow(3, 0, part.size(3)).copy_(part);
  set_mask(question, mask);
}

void own_part_for_all_keys(Question& question, int64_t rank) {
  const at::Tensor whole = four_dimensions(question.mask);
  const at::Tensor part = own_keys(question.c, whole, rank);
  if (part.size(3) > 0) set_mask(question, part.index_select(3, at::arange(whole.size(3)).remainder(part.size(3))));
}

// The rank's part of the text alone is seen.
void own_text(Question& question, int64_t rank) {
  const Case& c = question.c;
  const int64_t part = (c.text_len + c.cp_size - 1) / c.cp_size, first = c.text_suffix ? c.kv_seq_len() : 0;
  const at::Tensor key = key_places(c) - first;
  const at::Tensor is_text = (key >= 0) & (key < c.text_len);
  hide(question, is_text.logical_not() | ((key >= part * rank) & (key < part * (rank + 1))));
}

// Queries of the sequence count their place without the text in front of it.
void causal_without_text(Question& question, int64_t) {
  const Case c = question.c;
  question.c.is_causal = false;
  hide(question, key_places(c) <= query_places(c) - c.text_len);
}

// Text behind the sequence is seen although it comes later.
void suffix_always_seen(Question& question, int64_t) {
  const Case c = question.c;
  question.c.is_causal = false;
  hide(question, (key_places(c) <= query_places(c)) | (key_places(c) >= c.kv_seq_len()));
}

void full_text(Question& question, int64_t) { question.c.text_lens.clear(); }

void sinks_on_rank_0(Question& question, int64_t rank) {
  if (rank != 0) drop_sinks(question);
}

void sinks_of_first_heads(Question& question, int64_t) {
  const Case& c = question.c;
  question.sinks = question.sinks.to(at::kDouble).clone();
  const int64_t own = c.num_heads / c.cp_size;
  question.sinks.narrow(0, own, c.num_heads - own).fill_(-kInf);
}

void sinks_of_every_rank(Question& question, int64_t) {
  question.sinks = question.sinks.to(at::kDouble) + std::log(static_cast<double>(question.c.cp_size));
}

void drop_softcap(Question& question, int64_t) { question.c.softcap = 0; }

// softcap · tanh over scores that are masked already: a hidden key keeps the score −softcap. Said as a bias on the
// scores.
void cap_after_mask(Question& question, int64_t) {
  const Case c = question.c;
  const at::Tensor queries = join_text(c, question.text_q, question.q).to(at::kDouble);
  const at::Tensor keys = join_text(c, question.text_k, question.k).to(at::kDouble);
  const at::Tensor scores =
      at::einsum("bihd,bjhd->bhij", {queries, keys.repeat_interleave(c.num_heads / c.num_kv_heads, 2)}) * c.scale();
  at::Tensor masked = scores.masked_fill(visible_keys(question).logical_not(), -kInf);
  if (c.additive_mask) masked = masked + four_dimensions(question.mask).to(at::kDouble);
  question.c.softcap = 0;
  question.c.is_causal = false;
  set_mask(question, (masked / c.softcap).tanh() * c.softcap - scores);
}

// ---- hypotheses

// The number that says it: the weight of a key, what the keys leave to text or sinks, or how far the output is off.
enum class Measure { kKey, kText, kSink, kError };

struct Hypothesis {
  std::string_view kind;
  std::string_view sentence;  // without its number
  bool (*applies)(const Case& c);
  void (*alter)(Question& question, int64_t rank);
  bool by_rank;  // whether ranks differ
  Measure measure;
};

bool has_mask(const Case& c) { return !c.mask.empty(); }
bool has_head_mask(const Case& c) {
  return (c.mask == "head" || c.mask == "full") && c.cp_size > 1 && c.num_heads % c.cp_size == 0;
}
bool has_whole_rows(const Case& c) { return c.mask_has_query_axis() && c.text_len == 0 && c.cp_size > 1; }
bool has_own_part(const Case& c) { return has_mask(c) && c.text_len == 0 && !c.replicated_kv && c.cp_size > 1; }
bool has_text(const Case& c) { return c.text_len > 0; }
bool has_causal_text(const Case& c) { return c.text_len > 0 && c.is_causal; }
bool has_sinks(const Case& c) { return c.sinks; }
bool has_shared_sinks(const Case& c) { return c.sinks && c.cp_size > 1; }

constexpr std::array kHypotheses = std::to_array<Hypothesis>({
    {"mask_ignored", "attn_mask is ignored", has_mask, [](Question& q, int64_t) { drop_mask(q); }, false,
     Measure::kKey},
    {"mask_as_bias", "a bool attn_mask is added to the scores as 1 and 0 and hides nothing", is_bool, mask_as_bias,
     false, Measure::kKey},
    {"mask_inverted", "a bool attn_mask is read the other way round: True hides", is_bool, mask_inverted, false,
     Measure::kKey},
    {"mask_heads", "every rank reads attn_mask as if its heads were the first ones", has_head_mask, first_heads_of_mask,
     false, Measure::kKey},
    {"mask_rows", "every rank reads attn_mask as if its queries were the first ones", has_whole_rows,
     first_rows_of_mask, true, Measure::kKey},
    {"mask_local", "each rank applies only its own part of attn_mask, to its own keys", has_own_part,
     own_part_for_own_keys, true, Measure::kKey},
    {"mask_local", "each rank takes its own part of attn_mask for that of the first keys", has_own_part,
     own_part_for_first_keys, true, Measure::kKey},
    {"mask_local", "each rank takes its own part of attn_mask for that of every rank's keys", has_own_part,
     own_part_for_all_keys, true, Measure::kKey},
    {"text_lens_ignored", "joint_valid_lens is ignored: joint tokens behind their sequence's end are seen",
     [](const Case& c) { return !c.text_lens.empty(); }, full_text, false, Measure::kText},
    {"text_local", "the keys of the joint tokens are cut over the ranks: each rank sees its own part of them",
     [](const Case& c) { return has_text(c) && c.cp_size > 1; }, own_text, true, Measure::kText},
    {"causal_text", "the causal mask leaves out that the joint tokens come first",
     [](const Case& c) { return has_causal_text(c) && !c.text_suffix; }, causal_without_text, false, Measure::kText},
    {"causal_text", "the causal mask shows joint tokens that come behind the sequence",
     [](const Case& c) { return has_causal_text(c) && c.text_suffix; }, suffix_always_seen, false, Measure::kText},
    {"sinks_ignored", "sinks are ignored", has_sinks, [](Question& q, int64_t) { drop_sinks(q); }, false,
     Measure::kSink},
    {"sinks_of_one_rank", "only the queries of rank 0 have their sinks", has_shared_sinks, sinks_on_rank_0, true,
     Measure::kSink},
    {"sinks_of_one_rank", "only the heads of rank 0 have their sinks",
     [](const Case& c) { return has_shared_sinks(c) && c.num_heads % c.cp_size == 0; }, sinks_of_first_heads, false,
     Measure::kSink},
    {"sinks_count_twice", "sinks count once for every rank", has_shared_sinks, sinks_of_every_rank, false,
     Measure::kSink},
    {"softcap_ignored", "softcap is ignored", [](const Case& c) { return c.softcap != 0; }, drop_softcap, false,
     Measure::kError},
    {"softcap_after_mask", "softcap is applied behind the mask, so that hidden keys keep a weight",
     [](const Case& c) { return c.softcap != 0 && (has_mask(c) || c.is_causal); }, cap_after_mask, false,
     Measure::kKey},
});

// The output of every rank's rows by what the rank makes of the question.
at::Tensor out_of(const Hypothesis& hypothesis, const Question& question) {
  const auto altered = [&](int64_t rank) {
    Question other = question;
    hypothesis.alter(other, rank);
    return attention_reference(other).out;
  };
  if (!hypothesis.by_rank) return altered(0);
  const Case& c = question.c;
  std::vector<at::Tensor> rows;
  for (int64_t rank = 0; rank < c.cp_size; ++rank)
    rows.push_back(altered(rank).narrow(1, c.token_begin(rank), c.lengths[static_cast<size_t>(rank)]));
  return at::cat(rows, 1);
}

// The first place of [B, S, H, X] where the difference is as large as anywhere.
struct Place {
  int64_t batch = 0, query = 0, head = 0, key = 0;
};

Place worst_place(const at::Tensor& difference) {
  const at::Tensor size = difference.abs().nan_to_num(0, 0, 0).contiguous();
  const at::Tensor found = (size >= size.max() * 0.999).nonzero()[0].contiguous();
  const auto* index = found.const_data_ptr<int64_t>();
  return {index[0], index[1], index[2], index[3]};
}

std::string query_text(const Case& c, const Place& place) {
  const int64_t rank = c.rank_of_query(place.query);
  return cat("query ", place.query, " (row ", place.query - c.token_begin(rank), " of rank ", rank, ")",
             place.batch > 0 ? cat(" of sequence ", place.batch) : "");
}

double at_place(const at::Tensor& x, const Place& place) {
  return x[place.batch][place.query][place.head][place.key].item<double>();
}

// With q = k = 0: the weight of the key that is most off, or the share that is no key's.
std::string measured_text(Examiner& examiner, const Case& c, Measure measure) {
  if (measure == Measure::kError) return examiner.check(c).message;
  const Weights weights = measure_weights(examiner, c);
  if (!weights.measured.defined()) return examiner.check(c).message;
  const auto rest = [](const at::Tensor& x) { return 1 - x.sum(-1, true); };
  const bool of_key = measure == Measure::kKey;
  const at::Tensor got = of_key ? weights.measured : rest(weights.measured);
  const at::Tensor wanted = of_key ? weights.expected : rest(weights.expected);
  const Place place = worst_place(got - wanted);
  const auto number = [](double x) { return std::abs(x) < 1e-6 ? 0 : x; };
  const std::string taker = of_key                      ? cat("key ", place.key)
                            : measure == Measure::kText ? std::string("the joint tokens")
                                                        : cat("the sink of head ", place.head);
  return cat(query_text(c, place), of_key ? cat(", head ", place.head) : "", " gives ", taker, " the weight ",
             number(at_place(got, place)), " instead of ", number(at_place(wanted, place)));
}

}  // namespace

Diagnosis explain_options(Examiner& examiner, const Case& c) {
  if (!c.has_extras()) return std::nullopt;
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  if (!seen.complete()) return std::nullopt;
  const at::Tensor wanted = attention_reference(question).out;
  const double close = (c.dtype.ends_with("16") ? 3e-2 : 1e-4) * std::max(1.0, largest(wanted));
  for (const Hypothesis& hypothesis : kHypotheses) {
    if (!hypothesis.applies(c)) continue;
    const at::Tensor out = out_of(hypothesis, question);
    if (!(largest(seen.out - out) < close) || largest(wanted - out) < 10 * close) continue;
    return Finding{std::string(hypothesis.kind),
                   cat(hypothesis.sentence, ": ", measured_text(examiner, c, hypothesis.measure)),
                   {}};
  }
  return std::nullopt;
}

}  // namespace ulysses::doctor
