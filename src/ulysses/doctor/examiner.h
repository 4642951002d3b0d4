#pragma once

#include <optional>

#include "ulysses/doctor/finding.h"
#include "ulysses/doctor/ranks.h"
#include "ulysses/doctor/verdict.h"

namespace ulysses::doctor {

// Asks questions and puts the answers together. Sees what comes back and nothing of the target: no name, no source.
class Examiner {
 public:
  explicit Examiner(Ranks& ranks) : ranks_(ranks) {}

  Observation observe(const Question& question) { return assemble(question, ranks_.ask(question)); }
  Verdict check(const Case& c, uint64_t seed = 1) {
    const Question question = make_question(c, seed);
    return judge(question, observe(question));
  }
  bool is_ok(const Case& c) { return check(c).kind == VerdictKind::kOk; }

 private:
  Ranks& ranks_;
};

// A closed form that one probe looks at; empty where it finds nothing to say.
using Diagnosis = std::optional<Finding>;

}  // namespace ulysses::doctor
