#include "ulysses/doctor/rank_answer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
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
  return c.qkv_format == "bhsd" && x.defined() && x.dim() == 4 ? x.transpose(1, 2) : x;
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
at::Tensor grad_of_out(const Question& question, const RankCall& call, const Group& group) {
  const at::Tensor shard = formatted(query_shard(question.c, question.grad_out, group.rank(), /*padding=*/0), call.c);
  return question.c.sum_loss && !question.c.is_padded() ? shard : shard.clone();
}

void run_backward(const Question& question, const RankCall& call, const Group& group, RankAnswer& answer) {
  if (!answer.out.defined() || !answer.out.requires_grad()) return;
  const at::Tensor grad_out = grad_of_out(question, call, group).to(answer.out.options().requires_grad(false));
  if (grad_out.sizes() != answer.out.sizes()) return;
  const at::Tensor before = grad_out.clone();
  torch::autograd::backward({answer.out}, {grad_out});
  if (!at::equal(before, grad_out)) answer.violation = "the backward writes to the gradient that it is handed";
  answer.dq = call.q.grad();
  answer.dk = call.k.grad();
  answer.dv = call.v.grad();
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
  for (at::Tensor* tensor : {&answer.out, &answer.dq, &answer.dk, &answer.dv})
    if (tensor->defined()) *tensor = formatted(tensor->detach().cpu().clone(), c);
  if (answer.lse.defined()) answer.lse = answer.lse.detach().cpu();
}

}  // namespace

Target registered_target(const std::string& backend_name) {
  return [backend_name](const RankCall& call, const Group& group) {
    contract::AttentionOptions options = options_of(call.c);
    options.policy.backend_name = backend_name;
    return processors::ulysses_attention(call.q, call.k, call.v, group, options);
  };
}

Target processor_target(std::shared_ptr<processors::UlyssesAttentionProcessor> processor) {
  return [processor = std::move(processor)](const RankCall& call, const Group& group) {
    return processor->forward(call.q, call.k, call.v, group, options_of(call.c));
  };
}

RankAnswer answer_on_rank(const Question& question, const Target& target, const Group& group) {
  Case mine = question.c;
  if (group.rank() == question.odd_rank) mine.is_causal = !mine.is_causal;
  const at::AutoGradMode enabled(mine.backward);
  const auto copy = [](const at::Tensor& x) { return x.defined() ? x.clone() : x; };
  RankCall call{
      mine, {}, {}, {}, copy(question.mask), copy(question.text_q), copy(question.text_k), copy(question.text_v)};
  call.q = leaf(query_shard(mine, question.q, group.rank(), question.padding), mine, 'q');
  call.k = leaf(kv_shard(mine, question.k, group.rank(), question.padding), mine, 'k');
  call.v = leaf(kv_shard(mine, question.v, group.rank(), question.padding), mine, 'v');
  const std::vector<std::pair<const char*, at::Tensor>> inputs = {{"q", call.q},
                                                                  {"k", call.k},
                                                                  {"v", call.v},
                                                                  {"attn_mask", call.mask},
                                                                  {"joint q", call.text_q},
                                                                  {"joint k", call.text_k},
                                                                  {"joint v", call.text_v}};
  std::vector<at::Tensor> before;
  for (const auto& [name, x] : inputs) before.push_back(x.defined() ? x.detach().clone() : x);
  const auto recorder = std::make_shared<transports::Recorder>();
  const Group used = question.count_bytes ? Group(transports::record_group(group.process_group(), recorder)) : group;

  RankAnswer answer;
  try {
    const AttentionResult result = target(call, used);
    answer.out = result.out;
    answer.lse = result.lse;
    count(*recorder, answer);
    answer.violation = not_plain("out", answer.out) + not_plain("lse", answer.lse);
    if (!answer.violation.empty()) {
      answer.out = answer.lse = at::Tensor();
      return answer;
    }
    if (mine.backward) run_backward(question, call, group, answer);
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
