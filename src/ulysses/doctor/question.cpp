#include "ulysses/doctor/question.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"

namespace ulysses::doctor {
namespace {

at::Tensor padded_rows(const at::Tensor& rows, int64_t padding, double value) {
  return padding == 0 ? rows : at::constant_pad_nd(rows, {0, 0, 0, 0, 0, padding}, value);
}

// Which keys are visible. Key masks: the last five keys of every other sequence are hidden, as padding is. Others:
// three of ten by chance, never the first, so that a query sees something. Blind rows: the last sequence, the middle
// query or the last head sees nothing.
at::Tensor draw_visible(const Case& c, at::Generator& generator) {
  const int64_t queries = c.seq_len() + c.text_len, keys = c.kv_seq_len() + c.text_len;
  if (c.mask.starts_with("key")) {
    const at::Tensor visible = at::ones({c.batch, 1, 1, keys}, at::kBool);
    const int64_t hidden = std::min<int64_t>(5, keys / 2);
    visible.narrow(0, 0, (c.batch + 1) / 2).narrow(3, keys - hidden, hidden).fill_(false);
    if (c.blind_rows) visible.select(0, c.batch - 1).fill_(false);
    return c.mask == "key" ? visible.view({c.batch, keys}) : visible;
  }
  const bool is_full = c.mask == "full";
  const at::Tensor drawn = at::rand(
      {is_full ? c.batch : 1, c.mask == "query" ? 1 : c.num_heads, c.mask_has_query_axis() ? queries : 1, keys},
      generator, at::TensorOptions(at::kFloat));
  const at::Tensor visible = drawn < 0.7;
  visible.select(3, 0).fill_(true);
  if (c.blind_rows)
    (c.mask_has_query_axis() ? visible.select(2, queries / 2) : visible.select(1, c.num_heads - 1)).fill_(false);
  return visible;
}

at::Tensor draw_mask(const Case& c, at::ScalarType dtype, at::Generator& generator) {
  const at::Tensor visible = draw_visible(c, generator);
  if (!c.additive_mask) return visible;
  const at::Tensor bias = at::randn(visible.sizes(), generator, at::TensorOptions(at::kFloat)).to(dtype);
  return bias.masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
}

// Rows [begin, begin + length) of one axis of a mask, and `padding` rows that let everything through.
at::Tensor axis_shard(const at::Tensor& mask, int64_t dim, int64_t begin, int64_t length, int64_t padding) {
  std::vector<int64_t> sizes = mask.sizes().vec();
  sizes[static_cast<size_t>(dim)] = padding;
  const bool is_bool = mask.scalar_type() == at::kBool;
  return at::cat({mask.narrow(dim, begin, length), at::full(sizes, is_bool ? 1 : 7, mask.options())}, dim);
}

}  // namespace

void drop_mask(Question& question) {
  clear_mask(question.c);
  question.mask = at::Tensor();
}

void drop_sinks(Question& question) {
  question.c.sinks = false;
  question.sinks = at::Tensor();
}

at::ScalarType scalar_type_of(const std::string& dtype) {
  if (dtype == "float64") return at::kDouble;
  if (dtype == "bfloat16") return at::kBFloat16;
  if (dtype == "float16") return at::kHalf;
  if (dtype == "float32") return at::kFloat;
  throw base::Error({{"CP021", base::ErrorKind::kInvalidArgument, base::cat("dtype=", dtype, " is no floating dtype"),
                      "", "float32, float64, bfloat16 or float16"}},
                    "doctor");
}

Question make_question(const Case& c, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::ScalarType dtype = scalar_type_of(c.dtype);
  // Drawn in float32 and rounded, so that every dtype gets the same numbers as far as it can hold them.
  const auto draw = [&](int64_t tokens, int64_t heads, int64_t size) {
    return at::randn({c.batch, tokens, heads, size}, generator, at::TensorOptions(at::kFloat)).to(dtype);
  };
  Question question;
  question.c = c;
  question.q = draw(c.seq_len(), c.num_heads, c.head_dim).mul(c.magnitude);
  question.k = draw(c.kv_seq_len(), c.num_kv_heads, c.head_dim);
  question.v = draw(c.kv_seq_len(), c.num_kv_heads, c.value_head_dim);
  question.grad_out = draw(c.seq_len(), c.num_heads, c.value_head_dim);
  if (c.sum_loss) question.grad_out = at::ones({}, dtype).expand(question.grad_out.sizes());
  if (c.text_len > 0) {
    question.text_q = draw(c.text_len, c.num_heads, c.head_dim).mul(c.magnitude);
    question.text_k = draw(c.text_len, c.num_kv_heads, c.head_dim);
    question.text_v = draw(c.text_len, c.num_kv_heads, c.value_head_dim);
    question.text_grad_out = draw(c.text_len, c.num_heads, c.value_head_dim);
  }
  if (!c.mask.empty()) question.mask = draw_mask(c, dtype, generator);
  if (c.sinks) question.sinks = at::randn({c.num_heads}, generator, at::TensorOptions(at::kFloat)).to(dtype);
  if (c.lse_grad) {
    const auto draw_lse = [&](int64_t tokens) {
      return at::randn({c.batch, c.num_heads, tokens}, generator, at::TensorOptions(at::kFloat));
    };
    question.grad_lse = draw_lse(c.seq_len());
    if (c.text_len > 0) question.text_grad_lse = draw_lse(c.text_len);
  }
  return question;
}

Question uniform_question(const Case& c, const at::Tensor& v) {
  const at::ScalarType dtype = scalar_type_of(c.dtype);
  Question question = make_question(c);
  question.c.backward = false;
  question.padding = 0;  // keys and values like any other: what takes weight is seen in the sum
  question.q = at::zeros_like(question.q);
  question.k = at::zeros_like(question.k);
  question.v = v.to(dtype);
  for (at::Tensor* text : {&question.text_q, &question.text_k, &question.text_v})
    if (text->defined()) *text = at::zeros_like(*text);
  return question;
}

at::Tensor query_shard(const Case& c, const at::Tensor& x, int64_t rank, double padding) {
  const auto r = static_cast<size_t>(rank);
  return padded_rows(x.narrow(1, c.token_begin(rank), c.lengths[r]), c.padded_lengths[r] - c.lengths[r], padding);
}

at::Tensor kv_shard(const Case& c, const at::Tensor& x, int64_t rank, double padding) {
  if (c.replicated_kv) return x;
  const auto r = static_cast<size_t>(rank);
  const int64_t rows = c.kv_lengths == c.lengths ? c.padded_lengths[r] - c.lengths[r] : 0;
  return padded_rows(x.narrow(1, c.kv_token_begin(rank), c.kv_lengths[r]), rows, padding);
}

at::Tensor mask_shard(const Case& c, const at::Tensor& mask, int64_t rank) {
  if (!mask.defined() || c.local_axis.empty()) return mask;
  const auto r = static_cast<size_t>(rank);
  const int64_t padding = c.padded_lengths[r] - c.lengths[r];
  if (c.local_axis == "q") return axis_shard(mask, 2, c.token_begin(rank), c.lengths[r], padding);
  return axis_shard(mask, mask.dim() - 1, c.kv_token_begin(rank), c.kv_lengths[r],
                    c.kv_lengths == c.lengths ? padding : 0);
}

at::Tensor join_text(const Case& c, const at::Tensor& text, const at::Tensor& x, int64_t dim) {
  if (!text.defined()) return x;
  return c.text_suffix ? at::cat({x, text}, dim) : at::cat({text, x}, dim);
}

TextAndRows part_text(const Case& c, const at::Tensor& joined, int64_t dim) {
  if (!joined.defined() || c.text_len == 0) return {{}, joined};
  const int64_t rows = joined.size(dim) - c.text_len;
  return {joined.narrow(dim, c.text_suffix ? rows : 0, c.text_len),
          joined.narrow(dim, c.text_suffix ? 0 : c.text_len, rows)};
}

}  // namespace ulysses::doctor
