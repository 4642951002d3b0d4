#pragma once

#include <string>
#include <vector>

#include "ulysses/doctor/case.h"

namespace ulysses::doctor {

// Which cases to make.
struct CaseSelection {
  std::vector<int64_t> worlds = {2, 4};
  std::vector<std::string> strategies;  // {""} for a target that has no such argument
  std::vector<std::string> dtypes = {"float32", "bfloat16", "float16", "float64"};
  bool quick = false;  // one shape a feature; float32, and bfloat16 for the plain call
  std::string glob;    // of Case::id(), "*" and "?"; "" takes all
};

// The strategies that are asked: one without a name where the selection has none.
std::vector<std::string> strategies_of(const CaseSelection& selection);

// Every row of the capability table × shapes × strategies × dtypes × numbers of ranks, the simple ones first.
std::vector<Case> make_cases(const CaseSelection& selection);

// The simplest call: 8 tokens a rank, as many KV as query heads (4, or the next multiple of cp_size), float32.
Case plain_case(int64_t cp_size, const std::string& strategy);

}  // namespace ulysses::doctor
