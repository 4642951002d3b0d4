#include "ulysses/doctor/reference.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "ulysses/doctor/tensors.h"

namespace ulysses::doctor {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Joint tokens that are real, with everything else: [B, tokens] bool.
at::Tensor valid_tokens(const Case& c, int64_t tokens) {
  const at::Tensor place = at::arange(tokens).unsqueeze(0);
  if (c.text_lens.empty()) return (place >= 0).expand({c.batch, tokens});
  const at::Tensor lens = at::tensor(c.text_lens).unsqueeze(1);
  const int64_t first = c.text_suffix ? tokens - c.text_len : 0;  // place of the first joint token
  return (place < first + lens).logical_or(place >= first + c.text_len);
}

// The inputs in one dtype, text beside them.
struct Inputs {
  at::Tensor q, k, v, text_q, text_k, text_v, mask, sinks;
};

Inputs inputs_of(const Question& question, at::ScalarType dtype, bool trains) {
  const auto leaf = [&](const at::Tensor& x) {
    if (!x.defined() || x.scalar_type() == at::kBool) return x;
    return x.detach().to(dtype).requires_grad_(trains);
  };
  return {leaf(question.q),      leaf(question.k),      leaf(question.v),    leaf(question.text_q),
          leaf(question.text_k), leaf(question.text_v), leaf(question.mask), leaf(question.sinks)};
}

struct Softmax {
  at::Tensor weights;  // [B, H, T + S, T + S_kv]
  at::Tensor lse;      // [B, H, T + S], float64
};

Softmax softmax_of(const Question& question, const Inputs& in) {
  const Case& c = question.c;
  // The oracle may repeat K: it is small, and obviously right.
  const at::Tensor keys = join_text(c, in.text_k, in.k).repeat_interleave(c.num_heads / c.num_kv_heads, 2);
  at::Tensor scores = at::einsum("bihd,bjhd->bhij", {join_text(c, in.text_q, in.q), keys}) * c.scale();
  if (c.softcap != 0) scores = (scores / c.softcap).tanh() * c.softcap;
  if (in.mask.defined() && in.mask.is_floating_point()) scores = scores + four_dimensions(in.mask);
  scores = scores.masked_fill(visible_keys(question).logical_not(), -kInf);
  const int64_t num_keys = scores.size(3), queries = scores.size(2);
  if (in.sinks.defined()) {
    const at::Tensor valid = valid_tokens(c, queries).view({c.batch, 1, queries, 1});
    const at::Tensor sinks = in.sinks.view({1, -1, 1, 1}).expand({c.batch, c.num_heads, queries, 1});
    scores = at::cat({scores, sinks.masked_fill(valid.logical_not(), -kInf)}, 3);
  }
  const at::Tensor sees_nothing = scores.isneginf().all(-1, true);
  scores = scores.masked_fill(sees_nothing, 0);
  const at::Tensor lse = scores.to(at::kDouble).logsumexp(-1).masked_fill(sees_nothing.squeeze(-1), -kInf);
  return {scores.softmax(-1).masked_fill(sees_nothing, 0).narrow(3, 0, num_keys), lse};
}

// Gradients of all inputs, in the members that are named after them.
void set_gradients(const Question& question, const Inputs& in, const at::Tensor& out, const at::Tensor& lse,
                   Reference& reference) {
  const Case& c = question.c;
  std::vector<at::Tensor> of = {out}, grads = {join_text(c, question.text_grad_out, question.grad_out).to(out.dtype())};
  if (c.lse_grad) {
    of.push_back(lse);
    grads.push_back(join_text(c, question.text_grad_lse, question.grad_lse, 2).to(at::kDouble));
  }
  std::vector<std::pair<at::Tensor, at::Tensor Reference::*>> inputs;
  for (const auto& [x, member] : {std::pair{in.q, &Reference::dq},
                                  {in.k, &Reference::dk},
                                  {in.v, &Reference::dv},
                                  {in.text_q, &Reference::text_dq},
                                  {in.text_k, &Reference::text_dk},
                                  {in.text_v, &Reference::text_dv},
                                  {in.mask, &Reference::dmask},
                                  {in.sinks, &Reference::dsinks}})
    if (x.defined() && x.requires_grad()) inputs.emplace_back(x, member);
  std::vector<at::Tensor> leaves;
  for (const auto& [x, member] : inputs) leaves.push_back(x);
  const auto found = torch::autograd::grad(of, leaves, grads);
  for (size_t i = 0; i < inputs.size(); ++i) reference.*inputs[i].second = found[i];
}

}  // namespace

at::Tensor visible_keys(const Question& question) {
  const Case& c = question.c;
  const int64_t queries = c.seq_len() + c.text_len, keys = c.kv_seq_len() + c.text_len;
  const at::Tensor query = at::arange(queries).view({-1, 1});
  const at::Tensor key = at::arange(keys).view({1, -1});
  at::Tensor visible = key >= 0;
  if (c.is_causal) visible = visible & (key <= query + (c.bottom_right ? keys - queries : 0));
  if (c.window > 0) visible = visible & (key >= query - c.window) & (key <= query);
  if (c.num_documents > 1) {
    const int64_t document_len = c.seq_len() / c.num_documents;
    visible = visible & query.floor_divide(document_len).eq(key.floor_divide(document_len));
  }
  visible = visible.expand({c.batch, 1, queries, keys});
  if (!c.text_lens.empty())
    visible =
        visible & valid_tokens(c, queries).view({c.batch, 1, -1, 1}) & valid_tokens(c, keys).view({c.batch, 1, 1, -1});
  if (question.mask.defined() && question.mask.scalar_type() == at::kBool)
    visible = visible & four_dimensions(question.mask);
  return visible;
}

at::Tensor attention_weights(const Question& question) {
  return softmax_of(question, inputs_of(question, at::kDouble, /*trains=*/false)).weights;
}

Reference attention_reference(const Question& question, at::ScalarType dtype) {
  const Case& c = question.c;
  const at::AutoGradMode enabled(c.backward);
  const Inputs in = inputs_of(question, dtype, c.backward);
  const Softmax softmax = softmax_of(question, in);
  const at::Tensor values = join_text(c, in.text_v, in.v).repeat_interleave(c.num_heads / c.num_kv_heads, 2);
  const at::Tensor out = at::einsum("bhij,bjhd->bihd", {softmax.weights, values});
  const TextAndRows outs = part_text(c, out.detach()), lses = part_text(c, softmax.lse.detach(), 2);
  Reference reference;
  reference.out = outs.rows;
  reference.lse = lses.rows;
  reference.text_out = outs.text;
  reference.text_lse = lses.text;
  if (c.backward) set_gradients(question, in, out, softmax.lse, reference);
  return reference;
}

}  // namespace ulysses::doctor
