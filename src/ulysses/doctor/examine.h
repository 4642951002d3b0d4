#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/ranks.h"
#include "ulysses/doctor/report.h"

namespace ulysses::doctor {

struct ExamineOptions {
  CaseSelection selection;
  bool probes = true;
  // Called after every case.
  std::function<void(const CaseResult& result, int64_t done, int64_t total)> on_case;
};

// Asks the ranks every selected case and every probe, and says in plain sentences what is wrong.
// Cost: a few hundred small questions, forward and backward; a wrong case adds some dozens.
Report examine(Ranks& ranks, const ExamineOptions& options);

// One case alone, for `ulysses repro` and for tests: its verdict and what is wrong, if it is; behind it its forward
// alone, where backward is refused.
struct ExaminedCase {
  CaseResult result;
  std::optional<Finding> finding;
};
std::vector<ExaminedCase> examine_case(Ranks& ranks, const Case& c);

// The same over ranks that are threads of this process, for a target in C++.
//   const auto report = ulysses::doctor::run(ulysses::doctor::processor_target(my_backend));
//   std::cout << report.text();
//   return report.passed() ? 0 : 1;
// Strategies: those of options.selection; by default all of our own operation. Errors: CP006 (a number of ranks).
Report run(const Target& target, ExamineOptions options = {});

}  // namespace ulysses::doctor
