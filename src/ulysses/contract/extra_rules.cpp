#include <array>
#include <limits>
#include <tuple>

#include "ulysses/base/text.h"
#include "ulysses/contract/attention_facts.h"
#include "ulysses/contract/rules.h"

// The rules about joint tokens, replicated K/V, sinks and softcap: CP029, CP034, CP043, CP044.
namespace ulysses::contract {
namespace {

using base::cat;
using base::ErrorKind;
using base::join;

CallProblems joint_rows_rule(const CallFacts& facts) {
  const AttentionSpec& spec = facts.spec;
  if (!spec.joint_problem.empty())
    return {invalid("CP029", spec.joint_problem, "Joint tokens have the batch, heads and head sizes of q, k and v",
                    "JointTokens(q [B, T, H, D], k [B, T, H_kv, D], v [B, T, H_kv, D_v]) of one dtype and device, with "
                    "valid_lens=None or B numbers")};
  if (spec.joint_len == 0) return {};
  if (spec.joint_len < 0)
    return {invalid("CP029", cat("joint_len=", spec.joint_len, " is negative"), "", "joint_len=0 or more")};
  CallProblems problems;
  const auto check = [&](std::string_view name, bool is_4d, const TensorSpec& tensor) {
    if (is_4d && tensor.sizes[1] < spec.joint_len)
      problems.push_back(invalid("CP029", cat(name, " has ", tensor.sizes[1], " rows and joint_len=", spec.joint_len),
                                 "Joint tokens stand beside the rank's rows in q, k and v",
                                 cat(name, " with ", spec.joint_len, " rows more than the rank's own")));
  };
  check("q", facts.q_is_4d, spec.q);
  check("k", facts.k_is_4d, spec.k);
  return problems;
}

CallProblems valid_lens_rule(const CallFacts& facts) {
  const auto& lens = facts.spec.joint_valid_lens;
  if (lens.empty() || !facts.q_is_4d) return {};
  bool legal = static_cast<int64_t>(lens.size()) == facts.batch;
  for (const int64_t len : lens) legal = legal && len >= 0 && len <= facts.spec.joint_len;
  if (legal) return {};
  return {invalid(
      "CP029", cat("joint.valid_lens=[", join(lens), "] for B=", facts.batch, " sequences of T=", facts.spec.joint_len),
      "", cat("valid_lens with ", facts.batch, " numbers from 0 to ", facts.spec.joint_len, ", or valid_lens=None"))};
}

CallProblems replicated_rule(const CallFacts& facts) {
  const AttentionSpec& spec = facts.spec;
  if (spec.kv_role != "replicated") return {};
  CallProblems problems;
  if (spec.joint_len > 0)
    problems.push_back({"CP043", ErrorKind::kUnsupported,
                        "joint= with kv_role=\"replicated\": both say which keys every rank holds", "",
                        "the text's K and V in front of k and v, with kv_role=\"replicated\" and joint=None"});
  if (spec.kv_layout)
    problems.push_back({"CP044", ErrorKind::kUnsupported, "kv_layout with kv_role=\"replicated\"",
                        "Every rank holds all keys, so nothing says who holds which",
                        "kv_layout=None, or kv_role=\"sharded\""});
  return problems;
}

CallProblems sinks_rule(const CallFacts& facts) {
  const auto& [spec, sinks] = std::tie(facts.spec, facts.spec.sinks);
  if (!spec.sinks_type.empty())
    return {invalid("CP034", cat("sinks is a ", spec.sinks_type, ", not a tensor"), "",
                    "a floating tensor of shape [H], or sinks=None")};
  if (!sinks || !facts.q_is_4d) return {};
  const bool legal =
      sinks->is_floating && sinks->sizes == std::vector<int64_t>{facts.num_heads} && sinks->device == spec.q.device;
  if (legal) return {};
  return {invalid("CP034",
                  cat("sinks has shape [", join(sinks->sizes), "], dtype=", sinks->dtype, ", device=", sinks->device),
                  "Every rank passes one logit per query head, of all heads",
                  cat("sinks of shape [", facts.num_heads, "], floating, on ", facts.spec.q.device))};
}

CallProblems softcap_rule(const CallFacts& facts) {
  const auto& softcap = facts.spec.softcap;
  // Most scores are float32, where a larger cap is infinite and every score NaN.
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (!softcap || (*softcap > 0 && *softcap <= kLargest)) return {};
  return {invalid("CP034", cat("softcap=", *softcap), "Scores are capped at a positive number",
                  "softcap=50.0, or softcap=None")};
}

constexpr std::array<CallRule, 5> kRules = {joint_rows_rule, valid_lens_rule, replicated_rule, sinks_rule,
                                            softcap_rule};

}  // namespace

std::span<const CallRule> extra_rules() { return kRules; }

}  // namespace ulysses::contract
