#include <algorithm>
#include <array>
#include <utility>

#include "ulysses/base/text.h"
#include "ulysses/contract/attention_facts.h"
#include "ulysses/contract/rules.h"

// The rules about q, k and v themselves: CP020–CP024.
namespace ulysses::contract {
namespace {

using base::cat;
using base::join;

struct NamedTensor {
  std::string_view name;
  std::string_view axes;
  const TensorSpec& tensor;
};

std::array<NamedTensor, 3> tensors_of(const AttentionSpec& spec) {
  return {{{"q", "[B, S_local, H, D]", spec.q},
           {"k", "[B, S_local, H_kv, D]", spec.k},
           {"v", "[B, S_local, H_kv, D_v]", spec.v}}};
}

CallProblems four_dimensions_rule(const CallFacts& facts) {
  CallProblems problems;
  const std::array<bool, 3> legal = {facts.q_is_4d, facts.k_is_4d, facts.v_is_4d};
  size_t index = 0;
  for (const auto& [name, axes, tensor] : tensors_of(facts.spec)) {
    if (legal[index++]) continue;
    std::string fix = cat(name, " of shape ", axes);
    if (tensor.sizes.size() == 3) fix = cat(name, ".unsqueeze(0) of shape [1, ", join(tensor.sizes), "] as ", axes);
    problems.push_back(invalid("CP020",
                               cat(name, " has ", tensor.sizes.size(), " dimensions, sizes [", join(tensor.sizes), ']'),
                               "q, k and v are 4-D", std::move(fix)));
  }
  return problems;
}

CallProblems dtype_rule(const CallFacts& facts) {
  const auto tensors = tensors_of(facts.spec);
  const auto first_floating =
      std::find_if(tensors.begin(), tensors.end(), [](const NamedTensor& t) { return t.tensor.is_floating; });
  const std::string_view target =
      first_floating == tensors.end() ? "float32" : std::string_view(first_floating->tensor.dtype);
  bool legal = true;
  std::vector<std::string> got, fixes;
  for (const auto& [name, axes, tensor] : tensors) {
    got.push_back(cat(name, ".dtype=", tensor.dtype));
    if (tensor.is_floating && tensor.dtype == target) continue;
    legal = false;
    fixes.push_back(cat(name, ".to(torch.", target, ')'));
  }
  if (legal) return {};
  return {invalid("CP021", join(got), "q, k and v have one floating-point dtype", join(fixes))};
}

bool device_is_supported(std::string_view device) {
  return device == "cpu" || device == "cuda" || device.substr(0, 5) == "cuda:";
}

CallProblems device_rule(const CallFacts& facts) {
  const auto tensors = tensors_of(facts.spec);
  const auto first_supported = std::find_if(tensors.begin(), tensors.end(),
                                            [](const NamedTensor& t) { return device_is_supported(t.tensor.device); });
  const std::string_view target =
      first_supported == tensors.end() ? "cpu" : std::string_view(first_supported->tensor.device);
  std::vector<std::string> got, fixes;
  for (const auto& [name, axes, tensor] : tensors) {
    got.push_back(cat(name, ".device=", tensor.device));
    if (tensor.device != target) fixes.push_back(cat(name, ".to(\"", target, "\")"));
  }
  if (fixes.empty()) return {};
  return {invalid("CP022", join(got), "q, k and v are on one device, cpu or cuda", join(fixes))};
}

CallProblems head_counts_rule(const CallFacts& facts) {
  if (!facts.q_is_4d || !facts.k_is_4d) return {};
  CallProblems problems;
  if (auto problem = check_head_counts(facts.num_heads, facts.num_kv_heads)) problems.push_back(*std::move(problem));
  return problems;
}

// One CP024 for an axis on which `other` must agree with `reference`.
void compare_axis(CallProblems& problems, const NamedTensor& reference, const NamedTensor& other, size_t axis,
                  std::string_view axis_name) {
  const int64_t expected = reference.tensor.sizes[axis];
  const int64_t got = other.tensor.sizes[axis];
  if (expected == got) return;
  problems.push_back(invalid("CP024",
                             cat(other.name, " has ", axis_name, '=', got, ", ", reference.name, " has ", axis_name,
                                 '=', expected, " (dim ", axis, ')'),
                             cat(reference.name, " and ", other.name, " agree on ", axis_name),
                             cat(other.name, " with ", axis_name, '=', expected)));
}

CallProblems shapes_rule(const CallFacts& facts) {
  CallProblems problems;
  const auto [q, k, v] = tensors_of(facts.spec);
  if (facts.q_is_4d && facts.k_is_4d) {
    compare_axis(problems, q, k, 0, "B");
    compare_axis(problems, q, k, 3, "D");
  }
  if (facts.k_is_4d && facts.v_is_4d) {
    compare_axis(problems, k, v, 0, "B");
    compare_axis(problems, k, v, 1, "S_local");
    compare_axis(problems, k, v, 2, "H_kv");
  }
  const std::string rule = "A head has at least one element";
  if (facts.head_dim == 0) problems.push_back(invalid("CP024", "q has D=0 (dim 3)", rule, "D=1 or more"));
  if (facts.v_head_dim == 0) problems.push_back(invalid("CP024", "v has D_v=0 (dim 3)", rule, "D_v=1 or more"));
  return problems;
}

constexpr std::array<CallRule, 5> kRules = {
    four_dimensions_rule, dtype_rule, device_rule, head_counts_rule, shapes_rule,
};

}  // namespace

std::span<const CallRule> tensor_rules() { return kRules; }

}  // namespace ulysses::contract
