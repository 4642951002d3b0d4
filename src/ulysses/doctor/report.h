#pragma once

#include <string>
#include <vector>

#include "ulysses/doctor/finding.h"
#include "ulysses/doctor/verdict.h"

namespace ulysses::doctor {

constexpr int64_t kNoFinding = -1;

struct CaseResult {
  Case c;
  Verdict verdict;
  int64_t finding = kNoFinding;  // index into Report::findings
};

enum class ProbeVerdict { kOk, kWrong, kRefused, kNotApplicable };
std::string_view to_string(ProbeVerdict verdict);  // "ok", "wrong", "refused", "not_applicable"

struct ProbeResult {
  std::string name;  // "reach", "duality", …
  std::string strategy;
  int64_t cp_size = 0;
  ProbeVerdict verdict = ProbeVerdict::kOk;
  std::string detail;  // one plain sentence, or nothing
  int64_t finding = kNoFinding;
};

// The reach of every key token, measured beside expected, for a picture.
struct ReachPicture {
  std::string title;
  Case c;
  at::Tensor measured, expected;  // [S, S_kv] float64
};

// What the doctor found. Text and files are made from this and from nothing else.
struct Report {
  std::vector<CaseResult> cases;
  std::vector<ProbeResult> probes;
  std::vector<Finding> findings;
  std::vector<ReachPicture> pictures;

  // All cases ok or refused, no probe wrong, nothing else found.
  bool passed() const;
  int64_t count(VerdictKind kind) const;
  // A line per finding, then the counts.
  std::string text() const;
};

}  // namespace ulysses::doctor
