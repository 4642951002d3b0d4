#include <array>
#include <numeric>

#include "ulysses/base/text.h"
#include "ulysses/contract/attention_facts.h"
#include "ulysses/contract/rules.h"

// The rules about lengths, layouts and the group: CP002–CP015.
namespace ulysses::contract {
namespace {

using base::cat;
using base::join;
using base::Problem;

// Only of a layout that check_layout_lists has passed.
int64_t total_length(const LayoutSpec& layout) {
  return std::accumulate(layout.lengths.begin(), layout.lengths.end(), int64_t{0});
}

CallProblems policy_rule(const CallFacts& facts) { return check_policy(facts.spec.policy); }

CallProblems cp_size_rule(const CallFacts& facts) {
  CallProblems problems;
  add(problems, check_positive("cp_size", facts.spec.cp_size, "cp_size=1 or more"));
  return problems;
}

// CP007, CP010, CP011. Lengths divide or are padded in every other mode.
CallProblems strict_length_rule(const CallFacts& facts) {
  const AttentionSpec& spec = facts.spec;
  CallProblems problems;
  if (spec.policy.sequence_mode() != SequenceMode::kStrict) return problems;
  if (spec.layout) {
    if (facts.q_layout) {
      problems = check_divisible(spec.policy, "seq_len", total_length(*facts.q_layout), spec.cp_size, true);
    }
  } else {
    add(problems, check_local_rows(spec.policy, "q", facts.q_rows, spec.cp_size));
  }
  if (spec.kv_role == "replicated") return problems;
  if (spec.kv_layout) {
    if (facts.kv_layout) {
      const int64_t kv_len = total_length(*facts.kv_layout);
      for (Problem& problem : check_divisible(spec.policy, "kv_seq_len", kv_len, spec.cp_size, true)) {
        problems.push_back(std::move(problem));
      }
    }
  } else if (!spec.layout && facts.k_rows != facts.q_rows) {
    add(problems, check_local_rows(spec.policy, "k", facts.k_rows, spec.cp_size));
  }
  return problems;
}

CallProblems layout_lists_rule(const CallFacts& facts) {
  CallProblems problems;
  if (facts.spec.layout) add(problems, check_layout_lists("layout", *facts.spec.layout));
  if (facts.spec.kv_layout) add(problems, check_layout_lists("kv_layout", *facts.spec.kv_layout));
  return problems;
}

Problem wrong_rows(const CallFacts& facts, std::string_view tensor, int64_t rows, std::string_view layout_name,
                   const LayoutSpec& layout) {
  const auto rank = static_cast<size_t>(facts.spec.cp_rank);
  const int64_t expected = layout.padded_lengths[rank];
  std::string fix = cat(tensor, " with ", expected, " rows, as ", layout_name, ".shard(x, rank=", rank, ") cuts them");
  const TensorSpec& spec = tensor == "q" ? facts.spec.q : facts.spec.k;
  if (spec.sizes.size() == 4 && spec.sizes[2] == expected)
    fix = cat(tensor, ".transpose(1, 2), if it is [B, H, S_local, D]; or ", fix);
  if (tensor == "k" && layout_name == "layout")
    fix += cat(", or a kv_layout= in which rank ", rank, " has ", rows, " rows");
  return invalid("CP012",
                 cat(tensor, " has S_local=", rows, " rows, ", layout_name, ".padded_lengths[", rank, "]=", expected),
                 "A rank passes exactly the rows that the layout gives it", std::move(fix));
}

CallProblems layout_rows_rule(const CallFacts& facts) {
  CallProblems problems;
  if (!facts.group_is_legal) return problems;
  const auto rank = static_cast<size_t>(facts.spec.cp_rank);
  if (facts.q_layout && facts.q_rows >= 0 && facts.q_layout->padded_lengths[rank] != facts.q_rows) {
    problems.push_back(wrong_rows(facts, "q", facts.q_rows, "layout", *facts.q_layout));
  }
  if (facts.kv_layout && facts.k_rows >= 0 && facts.kv_layout->padded_lengths[rank] != facts.k_rows) {
    const std::string_view name = facts.spec.kv_layout ? "kv_layout" : "layout";
    problems.push_back(wrong_rows(facts, "k", facts.k_rows, name, *facts.kv_layout));
  }
  return problems;
}

std::optional<Problem> check_layout_size(const CallFacts& facts, std::string_view name,
                                         const std::optional<LayoutSpec>& layout) {
  if (!layout || facts.spec.cp_size <= 0 || check_layout_lists(name, *layout)) return std::nullopt;
  const auto ranks = static_cast<int64_t>(layout->lengths.size());
  if (ranks == facts.spec.cp_size) return std::nullopt;
  return invalid("CP014", cat(name, ".cp_size=", ranks, " but the group has cp_size=", facts.spec.cp_size),
                 "A layout names the rows of every rank of the group",
                 cat(name, "=SequenceLayout(", total_length(*layout), ", cp_size=", facts.spec.cp_size,
                     "), or a cp_group of ", ranks, " ranks"));
}

CallProblems layout_size_rule(const CallFacts& facts) {
  CallProblems problems;
  add(problems, check_layout_size(facts, "layout", facts.spec.layout));
  add(problems, check_layout_size(facts, "kv_layout", facts.spec.kv_layout));
  return problems;
}

std::optional<Problem> check_layout_rank(const CallFacts& facts, std::string_view name,
                                         const std::optional<LayoutSpec>& layout) {
  if (!layout || !layout->cp_rank || !facts.group_is_legal || *layout->cp_rank == facts.spec.cp_rank) {
    return std::nullopt;
  }
  return invalid("CP015",
                 cat(name, ".cp_rank=", *layout->cp_rank, " but the caller is rank ", facts.spec.cp_rank,
                     " of the group, cp_size=", facts.spec.cp_size),
                 "Another cp_group than the layout's would mix unrelated tokens",
                 cat("the cp_group in which this process is rank ", *layout->cp_rank, ", or ", name,
                     " with cp_rank=", facts.spec.cp_rank));
}

CallProblems layout_rank_rule(const CallFacts& facts) {
  CallProblems problems;
  if (facts.spec.cp_size > 0) add(problems, check_rank("cp_rank", facts.spec.cp_rank, facts.spec.cp_size));
  add(problems, check_layout_rank(facts, "layout", facts.spec.layout));
  add(problems, check_layout_rank(facts, "kv_layout", facts.spec.kv_layout));
  return problems;
}

constexpr std::array<CallRule, 7> kRules = {
    policy_rule,      cp_size_rule,     strict_length_rule, layout_lists_rule,
    layout_rows_rule, layout_size_rule, layout_rank_rule,
};

}  // namespace

std::optional<Problem> check_layout_lists(std::string_view name, const LayoutSpec& layout) {
  if (auto problem = check_shard_lengths(cat(name, ".lengths"), layout.lengths)) return problem;
  bool legal = layout.padded_lengths.size() == layout.lengths.size();
  for (size_t i = 0; legal && i < layout.lengths.size(); ++i) legal = layout.padded_lengths[i] >= layout.lengths[i];
  if (legal) return std::nullopt;
  return invalid("CP012",
                 cat(name, ".padded_lengths=[", join(layout.padded_lengths), "] cannot hold ", name, ".lengths=[",
                     join(layout.lengths), ']'),
                 "One number of rows per rank, none below the rank's length",
                 cat(name, "=SequenceLayout.from_lengths([", join(layout.lengths), "])"));
}

std::span<const CallRule> sequence_rules() { return kRules; }

}  // namespace ulysses::contract
