#include "ulysses/doctor/check_attention.h"

#include <c10/util/Exception.h>

#include <cmath>

#include "ulysses/base/text.h"
#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/diagnose.h"
#include "ulysses/doctor/tensors.h"

namespace ulysses::doctor {
namespace {

using base::cat;

// The function has no argument that says causal or not: asked for the other one, it refuses, so that a diagnosis does
// not take a right mask for the fault.
Target target_of(const AttentionFunction& attention, bool is_causal) {
  return [&attention, is_causal](const RankCall& call, const exchange::Group&) -> processors::AttentionResult {
    TORCH_CHECK_VALUE(call.c.is_causal == is_causal, "is_causal=", call.c.is_causal, " is not what this call is");
    return {attention(call.q, call.k, call.v), {}};
  };
}

std::string diagnosis_of(Examiner& examiner, const Case& c, const Verdict& verdict) {
  switch (verdict.kind) {
    case VerdictKind::kOk:
      return "ok";
    case VerdictKind::kWrong:
      return diagnose(examiner, c, verdict).sentence;
    case VerdictKind::kOneRankOnly:
      return verdict.message;
    default:
      return cat("every rank raised: ", verdict.message);
  }
}

}  // namespace

std::string AttentionCheck::text() const {
  const auto number = [](double error) {
    if (std::isnan(error)) return std::string("nan");  // without a sign
    return error < 0 ? std::string("not reached") : cat(error);
  };
  return cat(diagnosis, " (largest error: out ", number(forward_error), ", dq ", number(dq_error), ", dk ",
             number(dk_error), ", dv ", number(dv_error), ")");
}

AttentionCheck check_attention(const AttentionFunction& attention, const exchange::Group& group, bool is_causal) {
  GroupRanks ranks(target_of(attention, is_causal), group);
  Examiner examiner(ranks);
  Case c = plain_case(group.size(), /*strategy=*/"");
  c.is_causal = is_causal;
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  AttentionCheck check;
  check.diagnosis = diagnosis_of(examiner, c, judge(question, seen));
  if (!seen.complete()) return check;
  const Reference wanted = attention_reference(question);
  check.forward_error = largest(seen.out - wanted.out);
  check.dq_error = largest(seen.dq - wanted.dq);
  check.dk_error = largest(seen.dk - wanted.dk);
  check.dv_error = largest(seen.dv - wanted.dv);
  return check;
}

}  // namespace ulysses::doctor
