#include "ulysses/contract/policy.h"

#include <algorithm>
#include <array>
#include <optional>

#include "ulysses/base/text.h"
#include "ulysses/contract/rules.h"

namespace ulysses::contract {
namespace {

using base::cat;
using base::join;
using base::Problem;

constexpr std::string_view kBaseProcessor = "UlyssesAttentionProcessor";
constexpr std::string_view kOp = "ulysses_attention";

constexpr std::array<std::string_view, 3> kKnownChecks = {"seq_divisible", "kv_global_gathered", "output_restore_dim"};

constexpr std::array<PolicyField, 8> kFields = {{
    {"backend_name", "\"ulysses\"",
     "name under which the backend is registered; an unknown one is refused with the known names"},
    {"require_seq_divisible", "True",
     "shards must come from a length divisible by `cp_size * pad_multiple`; False: exact, uneven shards"},
    {"auto_pad", "True",
     "a length that does not divide is padded at its end (True) or refused with the padded length (False)"},
    {"pad_multiple", "8", "a shard's length is a multiple of this; it fixes shard lengths and nothing else"},
    {"kv_must_be_global", "True", "a query must see the keys and values of every rank; False is refused"},
    {"output_restore_dim", "1",
     "sequence dimension of the output; must be that of `qkv_format`: 1 for bshd, 2 for bhsd, 0 for sbhd"},
    {"base_processor", "\"UlyssesAttentionProcessor\"", "class that every backend inherits; another value is refused"},
    {"required_checks", "(\"seq_divisible\", \"kv_global_gathered\", \"output_restore_dim\")",
     "checks that the base class runs in every forward; removing or misspelling one is refused"},
}};

struct ConfigFacts {
  const UlyssesContextParallelPolicy& policy;
  int64_t seq_len = 0;
  int64_t cp_size = 0;
};

using Problems = std::vector<Problem>;
using ConfigRule = Problems (*)(const ConfigFacts&);

Problems base_processor_rule(const ConfigFacts& facts) {
  if (facts.policy.base_processor == kBaseProcessor) return {};
  return {invalid("CP002", cat("base_processor=\"", facts.policy.base_processor, "\" is not ", kBaseProcessor),
                  "Every backend inherits the class that enforces this policy",
                  cat("base_processor=\"", kBaseProcessor, '"'))};
}

Problems required_checks_rule(const ConfigFacts& facts) {
  const auto& given = facts.policy.required_checks;
  std::vector<std::string_view> missing, unknown;
  for (const std::string_view name : kKnownChecks) {
    if (std::find(given.begin(), given.end(), name) == given.end()) missing.push_back(name);
  }
  for (const std::string& name : given) {
    if (std::find(kKnownChecks.begin(), kKnownChecks.end(), name) == kKnownChecks.end()) unknown.push_back(name);
  }
  if (missing.empty() && unknown.empty()) return {};
  std::vector<std::string> faults, quoted;
  if (!missing.empty()) faults.push_back("lacks " + join(missing));
  if (!unknown.empty()) faults.push_back("holds the unknown " + join(unknown));
  for (const std::string_view name : kKnownChecks) quoted.push_back(cat('"', name, '"'));
  return {invalid("CP003", "required_checks " + join(faults, " and "), cat("Known: ", join(kKnownChecks)),
                  cat("required_checks=(", join(quoted), ')'))};
}

Problems kv_global_rule(const ConfigFacts& facts) {
  if (facts.policy.kv_must_be_global) return {};
  return {invalid("CP004", "kv_must_be_global=False is not offered",
                  "A query that misses other ranks' keys gives wrong numbers without an error",
                  "kv_must_be_global=True")};
}

Problems restore_dim_rule(const ConfigFacts& facts) {
  const int64_t dim = facts.policy.output_restore_dim;
  if (dim >= 0 && dim <= 2) return {};  // of bshd, bhsd or sbhd; a call says which
  return {invalid(
      "CP005",
      cat("output_restore_dim=", facts.policy.output_restore_dim, " is the sequence dimension of no qkv_format"),
      "The output is restored on the dimension that was sharded: 1 for bshd, 2 for bhsd, 0 for sbhd",
      "output_restore_dim=1")};
}

Problems pad_multiple_rule(const ConfigFacts& facts) {
  return to_list(check_positive("pad_multiple", facts.policy.pad_multiple, "pad_multiple=1 or more"));
}

Problems seq_len_rule(const ConfigFacts& facts) {
  // The shortest length that is legal under this policy, so that the fix works as it stands.
  int64_t shortest = 1;
  if (facts.policy.require_seq_divisible && facts.cp_size > 0 && facts.policy.pad_multiple > 0) {
    shortest = checked_multiply(facts.cp_size, facts.policy.pad_multiple).value_or(1);
  }
  return to_list(check_positive("seq_len", facts.seq_len, cat("seq_len=", shortest, " or a multiple of it")));
}

Problems cp_size_rule(const ConfigFacts& facts) {
  return to_list(check_positive("cp_size", facts.cp_size, "cp_size=1 or more"));
}

Problems divisible_rule(const ConfigFacts& facts) {
  return check_divisible(facts.policy, "seq_len", facts.seq_len, facts.cp_size, /*offer_auto_pad=*/false);
}

// In the order of their ids. The first kNumFieldRules look at the policy alone.
constexpr size_t kNumFieldRules = 5;
constexpr std::array<ConfigRule, 8> kRules = {
    base_processor_rule, required_checks_rule, kv_global_rule, restore_dim_rule,
    pad_multiple_rule,   seq_len_rule,         cp_size_rule,   divisible_rule,
};

Problems run(std::span<const ConfigRule> rules, const ConfigFacts& facts) {
  Problems problems;
  for (const ConfigRule rule : rules) {
    for (Problem& problem : rule(facts)) problems.push_back(std::move(problem));
  }
  return problems;
}

}  // namespace

int64_t UlyssesContextParallelPolicy::padded_seq_len(int64_t seq_len, int64_t cp_size) const {
  const ConfigFacts facts{*this, seq_len, cp_size};
  base::raise_if_any(run(std::span(kRules).subspan(kNumFieldRules - 1, 3), facts), kOp);
  if (!require_seq_divisible) return seq_len;
  const auto step = checked_multiply(cp_size, pad_multiple);
  const auto padded = step ? checked_round_up(seq_len, *step) : std::nullopt;
  if (padded) return *padded;
  Problems problems = divisible_rule(facts);
  problems.resize(1);  // CP007 comes first; divisibility is no error here
  throw base::Error(std::move(problems), kOp);
}

std::vector<std::string> UlyssesContextParallelPolicy::validate_config(int64_t seq_len, int64_t cp_size) const {
  std::vector<std::string> texts;
  for (const Problem& problem : check_config(*this, seq_len, cp_size)) texts.push_back(base::format(problem, kOp));
  return texts;
}

int64_t sequence_dim(std::string_view qkv_format) {
  if (qkv_format == "bhsd") return 2;
  return qkv_format == "sbhd" ? 0 : 1;
}

SequenceMode UlyssesContextParallelPolicy::sequence_mode() const {
  if (!require_seq_divisible) return SequenceMode::kUneven;
  return auto_pad ? SequenceMode::kPad : SequenceMode::kStrict;
}

std::vector<Problem> check_config(const UlyssesContextParallelPolicy& policy, int64_t seq_len, int64_t cp_size) {
  return run(kRules, {policy, seq_len, cp_size});
}

std::vector<Problem> check_policy(const UlyssesContextParallelPolicy& policy) {
  return run(std::span(kRules).first(kNumFieldRules), {policy});
}

std::span<const PolicyField> policy_fields() { return kFields; }

std::span<const std::string_view> known_checks() { return kKnownChecks; }

}  // namespace ulysses::contract
