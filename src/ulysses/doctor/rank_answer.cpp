#include "ulysses/doctor/rank_answer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <exception>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/processors/attention.h"
#include "ulysses/processors/tensor_spec.h"
#include "ulysses/transports/recording/recording_group.h"

namespace ulysses::doctor {
namespace {

using exchange::Group;
using processors::AttentionResult;

// [B, S, H, D] in the case's format, or back: both swap the same two dimensions.
at::Tensor formatted(const at::Tensor& x, const Case& c) {
  return x.defined() && x.dim() == 4 ? x.transpose(1, contract::sequence_dim(c.qkv_format)) : x;
}

// The rank's own copy: the target may not see the other ranks' rows through the storage.
at::Tensor leaf(const at::Tensor& shard, const Case& c, char name) {
  const at::Tensor x = formatted(shard, c);
  at::Tensor own = c.strided ? x.transpose(1, 2).contiguous().transpose(1, 2).clone() : x.contiguous().clone();
  return own.requires_grad_(c.backward && c.grad_of.find(name) != std::string::npos);
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return base::first_line(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return base::first_line(e.what());
  } catch (...) {
    return "an exception without a text";
  }
}

// The rank's own copy too; one that is a single number in memory stays so.
at::Tensor grad_of_out(const Question& question, const RankCall& call, int64_t rank) {
  const at::Tensor shard = formatted(query_shard(question.c, question.grad_out, rank, /*padding=*/0), call.c);
  return question.c.sum_loss && !question.c.is_padded() ? shard : shard.clone();
}

// What of the text's gradient is this rank's: every cp_size-th token of `dim`, so that the ranks' sum is the whole.
at::Tensor text_grad_share(const at::Tensor& grad, int64_t dim, const Case& c, int64_t rank) {
  at::Tensor share = at::zeros_like(grad);
  for (int64_t t = rank; t < c.text_len; t += c.cp_size) share.select(dim, t).copy_(grad.select(dim, t));
  return share;
}

at::Tensor grad_of_lse(const Question& question, int64_t rank) {
  const Case& c = question.c;
  const auto r = static_cast<size_t>(rank);
  const at::Tensor own = question.grad_lse.narrow(2, c.token_begin(rank), c.lengths[r]);
  return at::constant_pad_nd(own, {0, c.padded_lengths[r] - c.lengths[r]});
}

// The results that carry a gradient, each with this rank's part of it.
std::vector<std::pair<at::Tensor, at::Tensor>> losses_of(const Question& question, const RankCall& call, int64_t rank,
                                                         const RankAnswer& answer) {
  const Case& c = call.c;
  std::vector<std::pair<at::Tensor, at::Tensor>> losses;
  const auto add = [&](const at::Tensor& x, const auto& grad) {
    if (!x.defined() || !x.requires_grad()) return;
    const at::Tensor like_x = grad().to(x.options().requires_grad(false));
    if (like_x.sizes() == x.sizes()) losses.emplace_back(x, like_x);
  };
  add(answer.out, [&] { return grad_of_out(question, call, rank); });
  add(answer.text_out, [&] { return formatted(text_grad_share(question.text_grad_out, 1, c, rank), c); });
  if (!c.lse_grad) return losses;
  add(answer.lse, [&] { return grad_of_lse(question, rank); });
  add(answer.text_lse, [&] { return text_grad_share(question.text_grad_lse, 2, c, rank); });
  return losses;
}

void run_backward(const Question& question, const RankCall& call, int64_t rank, RankAnswer& answer) {
  std::vector<at::Tensor> of, grads, before;
  for (const auto& [x, grad] : losses_of(question, call, rank, answer)) {
    of.push_back(x);
    grads.push_back(grad);
    before.push_back(grad.clone());
  }
  if (of.empty()) return;
  torch::autograd::backward(of, grads);
  for (size_t i = 0; i < grads.size(); ++i)
    if (!at::equal(before[i], grads[i])) answer.violation = "the backward writes to the gradient that it is handed";
  const auto grad = [](const at::Tensor& x) { return x.defined() ? x.grad() : at::Tensor(); };
  answer.dq = grad(call.q);
  answer.dk = grad(call.k);
  answer.dv = grad(call.v);
  answer.text_dq = grad(call.text_q);
  answer.text_dk = grad(call.text_k);
  answer.text_dv = grad(call.text_v);
  answer.dmask = grad(call.mask);
  answer.dsinks = grad(call.sinks);
}

void count(const transports::Recorder& recorder, RankAnswer& answer) {
  for (const transports::CollectiveRecord& record : recorder.records()) {
    answer.collectives += 1;
    answer.bytes_sent += record.bytes_sent;
  }
}

// What a comparison cannot read: the rest of the doctor sees plain tensors only.
std::string not_plain(std::string_view name, const at::Tensor& x) {
  if (!x.defined() || (x.layout() == at::kStrided && !x.is_meta() && !x.is_complex())) return "";
  return base::cat(name, " is a ", c10::str(x.layout()), " tensor of ", processors::dtype_name(x.scalar_type()), " on ",
                   x.device().str(), ", not a plain one like q");
}

// Whether the next call, with other values, writes into the result of this one: a buffer that is handed out twice.
std::string change_by_next_call(const RankCall& call, const Target& target, const Group& group, const at::Tensor& out) {
  const at::Tensor held = out.detach().clone();
  RankCall next = call;
  next.v = (call.v.detach() + 1).requires_grad_(call.v.requires_grad());
  target(next, group);
  return at::equal(held, out.detach()) ? "" : "a call writes into the result of the call before it";
}

void to_host(const Case& c, RankAnswer& answer) {
  for (at::Tensor* tensor : RankAnswer::tensors(answer))
    if (tensor->defined()) *tensor = tensor->detach().cpu().clone();
  for (at::Tensor* tensor : {&answer.out, &answer.dq, &answer.dk, &answer.dv, &answer.text_out, &answer.text_dq,
                             &answer.text_dk, &answer.text_dv})
    *tensor = formatted(*tensor, c);
}

// Our own operation takes the text beside the rank's rows and returns it there.
Returned with_text_beside(const RankCall& call, const std::function<AttentionResult(const strategy::Qkv&)>& attend) {
  const Case& c = call.c;
  const int64_t dim = contract::sequence_dim(c.qkv_format);
  const AttentionResult joined = attend({join_text(c, call.text_q, call.q, dim), join_text(c, call.text_k, call.k, dim),
                                         join_text(c, call.text_v, call.v, dim)});
  const TextAndRows out = part_text(c, joined.out, dim), lse = part_text(c, joined.lse, 2);
  return Returned({out.rows, lse.rows}, out.text, lse.text);
}

RankCall call_of(const Question& question, const Case& mine, int64_t rank) {
  const auto copy = [](const at::Tensor& x, bool trains) { return x.defined() ? x.clone().requires_grad_(trains) : x; };
  RankCall call{mine, {}, {}, {}, {}, {}, {}, {}, {}};
  call.q = leaf(query_shard(mine, question.q, rank, question.padding), mine, 'q');
  call.k = leaf(kv_shard(mine, question.k, rank, question.padding), mine, 'k');
  call.v = leaf(kv_shard(mine, question.v, rank, question.padding), mine, 'v');
  if (mine.text_len > 0) {
    call.text_q = leaf(question.text_q, mine, 'q');
    call.text_k = leaf(question.text_k, mine, 'k');
    call.text_v = leaf(question.text_v, mine, 'v');
  }
  call.mask = copy(mask_shard(mine, question.mask, rank), mine.backward && mine.mask_grad);
  call.sinks = copy(question.sinks, mine.backward);
  return call;
}

}  // namespace

Target registered_target(const std::string& backend_name) {
  return [backend_name](const RankCall& call, const Group& group) {
    contract::AttentionOptions options = options_of(call.c);
    options.policy.backend_name = backend_name;
    return with_text_beside(call, [&](const strategy::Qkv& x) {
      return processors::ulysses_attention(x.q, x.k, x.v, group, options, {call.mask, call.sinks});
    });
  };
}

Target processor_target(std::shared_ptr<processors::UlyssesAttentionProcessor> processor) {
  return [processor = std::move(processor)](const RankCall& call, const Group& group) {
    return with_text_beside(call, [&](const strategy::Qkv& x) {
      return processors::ulysses_attention(*processor, x.q, x.k, x.v, group, options_of(call.c),
                                           {call.mask, call.sinks});
    });
  };
}

RankAnswer answer_on_rank(const Question& question, const Target& target, const Group& group) {
  Case mine = question.c;
  if (group.rank() == question.odd_rank) mine.is_causal = !mine.is_causal;
  const at::AutoGradMode enabled(mine.backward);
  const RankCall call = call_of(question, mine, group.rank());
  const std::vector<std::pair<const char*, at::Tensor>> inputs = {{"q", call.q},
                                                                  {"k", call.k},
                                                                  {"v", call.v},
                                                                  {"attn_mask", call.mask},
                                                                  {"sinks", call.sinks},
                                                                  {"joint q", call.text_q},
                                                                  {"joint k", call.text_k},
                                                                  {"joint v", call.text_v}};
  std::vector<at::Tensor> before;
  for (const auto& [name, x] : inputs) before.push_back(x.defined() ? x.detach().clone() : x);
  const auto recorder = std::make_shared<transports::Recorder>();
  const Group used = question.count_bytes ? Group(transports::record_group(group.process_group(), recorder)) : group;

  RankAnswer answer;
  try {
    const Returned result = target(call, used);
    answer.out = result.out;
    answer.lse = result.lse;
    answer.text_out = result.text_out;
    answer.text_lse = result.text_lse;
    count(*recorder, answer);
    answer.violation = not_plain("out", answer.out) + not_plain("lse", answer.lse) +
                       not_plain("the text's out", answer.text_out) + not_plain("the text's lse", answer.text_lse);
    if (!answer.violation.empty()) {
      answer.out = answer.lse = answer.text_out = answer.text_lse = at::Tensor();
      return answer;
    }
    // torch's own way to say that a result is not differentiable. One that takes a gradient must use it.
    if (mine.backward && mine.lse_grad && answer.lse.defined() && !answer.lse.requires_grad()) {
      answer.outcome = Outcome::kDeclined;
      answer.message = "lse carries no gradient: it does not require one";
    }
    if (mine.backward) run_backward(question, call, group.rank(), answer);
    if (question.hold_result) answer.violation += change_by_next_call(call, target, used, answer.out);
    to_host(mine, answer);
  } catch (...) {
    answer.outcome = Outcome::kRaised;
    answer.message = text_of(std::current_exception());
  }
  for (size_t i = 0; i < inputs.size(); ++i)
    if (before[i].defined() && !at::equal(before[i], inputs[i].second.detach()))
      answer.violation = base::cat("the call writes to its input ", inputs[i].first);
  return answer;
}

}  // namespace ulysses::doctor
