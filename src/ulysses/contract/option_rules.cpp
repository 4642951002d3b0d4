#include <algorithm>
#include <array>
#include <cmath>

#include "ulysses/base/text.h"
#include "ulysses/contract/attention_facts.h"
#include "ulysses/contract/rules.h"

// The rules about names, options and what a strategy or a backend can honour: CP001, CP025–CP050.
namespace ulysses::contract {
namespace {

using base::cat;
using base::ErrorKind;
using base::join;

CallProblems backend_rule(const CallFacts& facts) {
  // A caller without a registry leaves the list empty; then the name decides nothing.
  if (facts.spec.known_backends.empty()) return {};
  return to_list(check_word("CP001", "backend_name", facts.spec.policy.backend_name, facts.spec.known_backends));
}

CallProblems softmax_scale_rule(const CallFacts& facts) {
  if (!facts.spec.softmax_scale || std::isfinite(*facts.spec.softmax_scale)) return {};
  std::string fix = "softmax_scale=None (1/sqrt(D)";
  if (facts.head_dim > 0) fix += cat(" = ", 1.0 / std::sqrt(static_cast<double>(facts.head_dim)));
  return {{.id = "CP025",
           .kind = ErrorKind::kInvalidArgument,
           .what = cat("softmax_scale=", *facts.spec.softmax_scale, " is not finite"),
           .rule = "",
           .fix = fix + ')'}};
}

// The policy's own rule has refused what is the sequence dimension of no format.
CallProblems restore_dim_rule(const CallFacts& facts) {
  const AttentionSpec& spec = facts.spec;
  const int64_t wanted = sequence_dim(spec.qkv_format);
  const int64_t got = spec.policy.output_restore_dim;
  if (got == wanted || got < 0 || got > 2) return {};
  return {invalid(
      "CP005", cat("output_restore_dim=", got, " is not the sequence dimension of qkv_format=\"", spec.qkv_format, '"'),
      "The output is restored on the dimension that was sharded", cat("output_restore_dim=", wanted))};
}

CallProblems requested_size_rule(const CallFacts& facts) {
  const auto& requested = facts.spec.requested_cp_size;
  if (!requested || *requested == facts.spec.cp_size) return {};
  return {{.id = "CP026",
           .kind = ErrorKind::kInvalidArgument,
           .what = cat("cp_size=", *requested, " but the group has ", facts.spec.cp_size, " ranks"),
           .rule = "cp_size, when given, is the size of cp_group",
           .fix = cat("cp_size=", facts.spec.cp_size, ", or cp_size=None")}};
}

CallProblems strategy_rule(const CallFacts& facts) {
  return to_list(check_word("CP030", "strategy", facts.spec.strategy, known_strategies()));
}

CallProblems kernel_rule(const CallFacts& facts) {
  if (facts.spec.kernel == "auto") return {};
  std::vector<std::string_view> known = {"auto"};
  known.insert(known.end(), facts.spec.known_kernels.begin(), facts.spec.known_kernels.end());
  auto problem = check_word("CP031", "kernel", facts.spec.kernel, known);
  // Which of the others serves this device and dtype is not known here; these two always do.
  if (problem) problem->fix = unknown_word("CP031", "kernel", facts.spec.kernel, {"auto", "math"}).fix;
  return to_list(std::move(problem));
}

bool is_offered(Feature feature) {
  const auto table = capability_table();
  return std::any_of(table.begin(), table.end(), [feature](const Capability& cell) {
    return cell.feature == feature && cell.support == Support::kSupported;
  });
}

CallProblems words_rule(const CallFacts& facts) {
  using Words = std::vector<std::string_view>;
  const AttentionSpec& spec = facts.spec;
  static const Words kAgreements = {"auto", "always", "off"}, kFormats = {"bshd", "bhsd", "sbhd"},
                     kRoles = {"sharded", "replicated"}, kAlignments = {"top_left", "bottom_right"},
                     kOuters = {"ring", "allgather_kv"}, kOrders = {"contiguous", "head_tail"},
                     kPositions = {"prefix", "suffix"};
  CallProblems problems;
  // The words behind the first ask for a feature; a fix names them only if a strategy offers it.
  const auto check = [&problems](std::string_view name, const std::string& value, const Words& known,
                                 std::optional<Feature> feature = {}) {
    auto problem = check_word("CP033", name, value, known);
    if (!problem) return;
    if (feature && !is_offered(*feature)) problem->fix = unknown_word("CP033", name, value, {known.front()}).fix;
    problems.push_back(*std::move(problem));
  };
  check("agreement", spec.agreement, kAgreements);
  check("qkv_format", spec.qkv_format, kFormats, Feature::kQkvFormat);
  check("kv_role", spec.kv_role, kRoles, Feature::kReplicatedKv);
  check("causal_alignment", spec.causal_alignment, kAlignments, Feature::kBottomRightCausal);
  check("joint.position", spec.joint_position, kPositions, Feature::kJointSuffix);
  check("outer", spec.outer, kOuters, Feature::kHybridDegree);
  if (spec.layout) check("layout.order", spec.layout->order, kOrders, Feature::kHeadTailOrder);
  if (spec.kv_layout) check("kv_layout.order", spec.kv_layout->order, kOrders, Feature::kHeadTailOrder);
  return problems;
}

// The strategies that support a feature, as alternatives of a fix.
std::string other_strategies(Feature feature) {
  std::string text;
  for (const Capability& cell : capability_table()) {
    if (cell.feature == feature && cell.support == Support::kSupported)
      text += cat(", or strategy=\"", cell.strategy, '"');
  }
  return text;
}

// CP040–CP049, read from the table.
CallProblems capability_rule(const CallFacts& facts) {
  CallProblems problems;
  const auto strategies = known_strategies();
  if (std::find(strategies.begin(), strategies.end(), facts.spec.strategy) == strategies.end()) return problems;
  for (const Feature feature : features_of(facts.spec)) {
    const Capability& cell = capability(facts.spec.strategy, feature);
    if (cell.support == Support::kSupported) continue;
    problems.push_back({.id = std::string(cell.id),
                        .kind = ErrorKind::kUnsupported,
                        .what = cat(to_string(feature), " is not offered by strategy=\"", cell.strategy, '"'),
                        .rule = "",
                        .fix = cat(cell.note, other_strategies(feature))});
  }
  return problems;
}

CallProblems backend_supports_rule(const CallFacts& facts) {
  const AttentionSpec& spec = facts.spec;
  CallProblems problems;
  const auto declared = [&spec](std::string_view name) {
    const auto& names = spec.backend_supports;
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const auto refuse = [&](std::string_view field, std::string_view otherwise) {
    problems.push_back(
        {.id = "CP050",
         .kind = ErrorKind::kUnsupported,
         .what = cat("this backend does not declare ", field),
         .rule =
             spec.backend_supports.empty() ? "It declares nothing" : cat("It declares ", join(spec.backend_supports)),
         .fix = cat(otherwise, ", or \"", field, "\" in the backend's supports once attend() honours it")});
  };
  if (spec.is_causal && !declared("is_causal")) refuse("is_causal", "is_causal=False");
  if (spec.softmax_scale && !declared("softmax_scale")) refuse("softmax_scale", "softmax_scale=None");
  // Ulysses hands attend() the whole sequence; here a rank's queries start in the middle of it.
  const bool local_queries = spec.strategy == "allgather_kv" && spec.cp_size > 1;
  if (spec.is_causal && local_queries && !declared("q_positions")) refuse("q_positions", "strategy=\"ulysses\"");
  if (spec.attn_mask && !declared("attn_mask")) refuse("attn_mask", "attn_mask=None");
  if (!spec.joint_valid_lens.empty() && !declared("attn_mask")) refuse("attn_mask", "joint.valid_lens=None");
  if (spec.sinks && !declared("sinks")) refuse("sinks", "sinks=None");
  if (spec.softcap && !declared("softcap")) refuse("softcap", "softcap=None");
  if (spec.return_lse && !declared("need_lse")) refuse("need_lse", "return_lse=False");
  return problems;
}

constexpr std::array<CallRule, 9> kRules = {
    backend_rule, softmax_scale_rule, restore_dim_rule, requested_size_rule,   strategy_rule,
    kernel_rule,  words_rule,         capability_rule,  backend_supports_rule,
};

}  // namespace

std::span<const CallRule> option_rules() { return kRules; }

}  // namespace ulysses::contract
