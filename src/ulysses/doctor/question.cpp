#include "ulysses/doctor/question.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"

namespace ulysses::doctor {
namespace {

at::Tensor padded_rows(const at::Tensor& rows, int64_t padding, double value) {
  return padding == 0 ? rows : at::constant_pad_nd(rows, {0, 0, 0, 0, 0, padding}, value);
}

}  // namespace

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
    question.text_q = draw(c.text_len, c.num_heads, c.head_dim);
    question.text_k = draw(c.text_len, c.num_kv_heads, c.head_dim);
    question.text_v = draw(c.text_len, c.num_kv_heads, c.value_head_dim);
  }
  if (c.masked_keys > 0) {
    question.mask = at::ones({c.batch, c.kv_seq_len()}, at::kBool);
    question.mask.narrow(0, 0, (c.batch + 1) / 2).narrow(1, c.kv_seq_len() - c.masked_keys, c.masked_keys).fill_(false);
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

}  // namespace ulysses::doctor
