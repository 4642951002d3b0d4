#include "ulysses/doctor/cases.h"

#include <algorithm>

#include "ulysses/doctor/shapes.h"

namespace ulysses::doctor {
namespace {

using contract::Feature;

// "*" and "?" as in a shell, over the whole text.
bool matches(std::string_view glob, std::string_view text) {
  size_t g = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (g < glob.size() && (glob[g] == '?' || glob[g] == text[t]) && glob[g] != '*') {
      ++g, ++t;
    } else if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = t;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

}  // namespace

Case plain_case(int64_t cp_size, const std::string& strategy) {
  Case c;
  c.cp_size = cp_size;
  c.strategy = strategy;
  const int64_t num_heads = (4 + cp_size - 1) / cp_size * cp_size;  // 4, or more where 4 is no multiple
  c.num_heads = c.num_kv_heads = num_heads;
  set_shards(c, 8);
  return c;
}

std::vector<std::string> strategies_of(const CaseSelection& selection) {
  return selection.strategies.empty() ? std::vector<std::string>{""} : selection.strategies;
}

std::vector<Case> make_cases(const CaseSelection& selection) {
  std::vector<Case> cases;
  for (const int64_t cp_size : selection.worlds) {
    for (const std::string& strategy : strategies_of(selection)) {
      const Shape* previous = nullptr;
      for (const Shape& row : all_shapes()) {
        const bool first = previous == nullptr || previous->feature != row.feature;
        previous = &row;
        if (selection.quick && !first) continue;
        Case c = plain_case(cp_size, strategy);
        c.feature = contract::to_string(row.feature);
        row.shape(c);
        if (cp_size == 1 && (c.num_heads < 1 || c.num_kv_heads < 1)) continue;  // no fewer heads than one rank
        for (const std::string& dtype : selection.dtypes) {
          c.dtype = dtype;
          const bool is_plain = row.feature == Feature::kEqualShards && dtype == "bfloat16";
          if (selection.quick && dtype != "float32" && !is_plain) continue;
          if (selection.glob.empty() || matches(selection.glob, c.id())) cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

}  // namespace ulysses::doctor
