#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "ulysses/doctor/question.h"
#include "ulysses/exchange/group.h"
#include "ulysses/processors/attention_processor.h"

namespace ulysses::doctor {

// What one rank hands to the attention under examination, in the case's qkv_format.
struct RankCall {
  const Case& c;
  at::Tensor q, k, v;                              // this rank's shards
  at::Tensor mask, sinks, text_q, text_k, text_v;  // undefined where the case has none
};

// out and lse of this rank's rows and, where the call has joint tokens, theirs.
struct Returned : processors::AttentionResult {
  at::Tensor text_out, text_lse;
  Returned() = default;
  Returned(processors::AttentionResult result, at::Tensor of_text = {}, at::Tensor lse_of_text = {})
      : AttentionResult(std::move(result)), text_out(std::move(of_text)), text_lse(std::move(lse_of_text)) {}
};

// A context-parallel attention under examination, as it is called on each rank. What it raises is its answer.
using Target = std::function<Returned(const RankCall& call, const exchange::Group& group)>;

// The built-in operation or a registered backend, through the C++ call.
Target registered_target(const std::string& backend_name = "ulysses");
// A backend that need not be registered.
Target processor_target(std::shared_ptr<processors::UlyssesAttentionProcessor> processor);

enum class Outcome {
  kReturned,
  kRaised,
  kCrashed,   // the process ended
  kHung,      // no answer within the limit
  kReleased,  // waited for another rank until that one failed
  kDeclined,  // returned, and its result says that it cannot do all that was asked; it kept nobody waiting
};

// What one rank answers, with its own rows only.
struct RankAnswer {
  Outcome outcome = Outcome::kReturned;
  std::string message;    // first line of what it raised
  at::Tensor out, lse;    // as returned
  at::Tensor dq, dk, dv;  // undefined where no gradient came
  at::Tensor text_out, text_lse, text_dq, text_dk, text_dv, dmask, dsinks;
  std::string violation;    // what no value excuses: an input written to, a result that is no plain tensor
  int64_t collectives = 0;  // counted at the group, forward
  int64_t bytes_sent = 0;   // payload to other ranks

  // Every tensor, in one order.
  template <typename Self>
  static auto tensors(Self& x) {
    return std::vector{&x.out,      &x.lse,     &x.dq,      &x.dk,      &x.dv,    &x.text_out,
                       &x.text_lse, &x.text_dq, &x.text_dk, &x.text_dv, &x.dmask, &x.dsinks};
  }
};

// Calls the target on this rank's part of the question, and its backward. Never throws what the target throws.
RankAnswer answer_on_rank(const Question& question, const Target& target, const exchange::Group& group);

}  // namespace ulysses::doctor
