#include "ulysses/doctor/reference.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/einsum.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

namespace ulysses::doctor {
namespace {

at::Tensor with_text(const at::Tensor& text, const at::Tensor& x) { return text.defined() ? at::cat({text, x}, 1) : x; }

}  // namespace

at::Tensor visible_keys(const Question& question) {
  const Case& c = question.c;
  const at::Tensor query = at::arange(c.seq_len()).view({-1, 1});
  const at::Tensor key = at::arange(c.kv_seq_len()).view({1, -1});
  at::Tensor visible = key >= 0;
  if (c.is_causal) visible = visible & (key <= query + (c.bottom_right ? c.kv_seq_len() - c.seq_len() : 0));
  if (c.window > 0) visible = visible & (key >= query - c.window) & (key <= query);
  if (c.num_documents > 1) {
    const int64_t document_len = c.seq_len() / c.num_documents;
    visible = visible & query.floor_divide(document_len).eq(key.floor_divide(document_len));
  }
  visible = visible.expand({c.batch, 1, c.seq_len(), c.kv_seq_len()});
  if (question.mask.defined()) visible = visible & question.mask.view({c.batch, 1, 1, -1});
  return at::constant_pad_nd(visible, {c.text_len, 0}, /*value=*/1);
}

Reference attention_reference(const Question& question, at::ScalarType dtype) {
  const Case& c = question.c;
  const at::AutoGradMode enabled(c.backward);
  const auto leaf = [&](const at::Tensor& x) { return x.detach().to(dtype).requires_grad_(c.backward); };
  const at::Tensor q = leaf(question.q), k = leaf(question.k), v = leaf(question.v);
  // The oracle may repeat K and V: it is small, and obviously right.
  const auto keys_of = [&](const at::Tensor& text, const at::Tensor& x) {
    return with_text(text.defined() ? text.to(dtype) : text, x).repeat_interleave(c.num_heads / c.num_kv_heads, 2);
  };
  const at::Tensor keys = keys_of(question.text_k, k), values = keys_of(question.text_v, v);
  const at::Tensor scores =
      (at::einsum("bihd,bjhd->bhij", {q, keys}) * c.scale())
          .masked_fill(visible_keys(question).logical_not(), -std::numeric_limits<double>::infinity());
  const at::Tensor sees_nothing = scores.isneginf().all(-1, true);
  const at::Tensor weights = scores.masked_fill(sees_nothing, 0).softmax(-1).masked_fill(sees_nothing, 0);
  const at::Tensor out = at::einsum("bhij,bjhd->bihd", {weights, values});
  Reference reference{out.detach(), scores.detach().to(at::kDouble).logsumexp(-1), {}, {}, {}};
  if (!c.backward) return reference;
  const auto grads = torch::autograd::grad({out}, {q, k, v}, {question.grad_out.to(dtype)});
  reference.dq = grads[0];
  reference.dk = grads[1];
  reference.dv = grads[2];
  return reference;
}

}  // namespace ulysses::doctor
