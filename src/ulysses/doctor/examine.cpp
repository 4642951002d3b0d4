#include "ulysses/doctor/examine.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "ulysses/base/text.h"
#include "ulysses/contract/capability.h"
#include "ulysses/doctor/diagnose.h"
#include "ulysses/doctor/probes.h"
#include "ulysses/doctor/weights.h"

namespace ulysses::doctor {
namespace {

class Examination {
 public:
  Examination(Ranks& ranks, const ExamineOptions& options) : examiner_(ranks), options_(options) {}

  Report run() {
    if (options_.probes) run_probes();
    const std::vector<Case> cases = make_cases(options_.selection);
    for (const Case& c : cases) {
      ask(c, std::ssize(cases));
      // A backward that is refused must not hide a forward that is wrong.
      const VerdictKind kind = report_.cases.back().verdict.kind;
      if (kind != VerdictKind::kRefused && kind != VerdictKind::kUnclearMessage) continue;
      Case forward = c;
      forward.backward = false;
      const VerdictKind alone = examiner_.check(forward).kind;
      if (alone == VerdictKind::kOk || alone == VerdictKind::kWrong) ask(forward, std::ssize(cases));
    }
    return std::move(report_);
  }

 private:
  void ask(const Case& c, int64_t total) {
    CaseResult result{c, examiner_.check(c), kNoFinding};
    result.finding = finding_of(result);
    report_.cases.push_back(result);
    done_ += c.backward ? 1 : 0;
    if (options_.on_case) options_.on_case(result, done_, total);
  }

  // Findings of one kind are one finding; the first sentence stands.
  int64_t add(Finding finding, const std::string& case_id) {
    auto& findings = report_.findings;
    auto found = std::find_if(findings.begin(), findings.end(),
                              [&](const Finding& known) { return known.kind == finding.kind; });
    if (found == findings.end()) found = findings.insert(findings.end(), std::move(finding));
    if (!case_id.empty()) found->cases.push_back(case_id);
    return found - findings.begin();
  }

  int64_t finding_of(const CaseResult& result) {
    const VerdictKind kind = result.verdict.kind;
    if (kind == VerdictKind::kOk || kind == VerdictKind::kRefused) return kNoFinding;
    const Case& c = result.c;
    const std::string id = c.id();
    if (kind != VerdictKind::kWrong) return add(diagnose(examiner_, c, result.verdict), id);
    // What makes the plain case wrong makes the others wrong; else one diagnosis for each feature.
    const auto plain = std::tuple(c.strategy, c.cp_size, std::string("equal_shards"));
    const auto own = std::tuple(c.strategy, c.cp_size, c.feature);
    for (const auto& key : {plain, own})
      if (const auto known = diagnosed_.find(key); known != diagnosed_.end()) {
        report_.findings[static_cast<size_t>(known->second)].cases.push_back(id);
        return known->second;
      }
    return diagnosed_[own] = add(diagnose(examiner_, c, result.verdict), id);
  }

  // The finding of the plain case, if it is wrong: a state that calls leave behind, else its diagnosis.
  int64_t cause_of(const Case& plain, int64_t state) {
    if (state == kNoFinding) {
      const Verdict verdict = examiner_.check(plain);
      if (verdict.kind != VerdictKind::kWrong) return kNoFinding;
      state = add(diagnose(examiner_, plain, verdict), "");
    }
    return diagnosed_[std::tuple(plain.strategy, plain.cp_size, plain.feature)] = state;
  }

  void run_probes() {
    for (const int64_t cp_size : options_.selection.worlds) {
      for (const std::string& strategy : options_.selection.strategies) {
        const Case plain = plain_case(cp_size, strategy);
        int64_t cause = kNoFinding;  // what is wrong with the plain case explains what probes of it find
        for (const Probe& probe : all_probes()) {
          ProbeResult result{std::string(probe.name), strategy, cp_size, ProbeVerdict::kOk, "", kNoFinding};
          if (Diagnosis found = probe.run(examiner_, plain, result)) {
            result.verdict = ProbeVerdict::kWrong;
            result.detail = found->sentence;
            result.finding = cause != kNoFinding ? cause : add(*found, "");
          }
          report_.probes.push_back(result);
          if (probe.name == "state") cause = cause_of(plain, result.finding);
        }
        draw(plain);
        Case causal = plain;
        causal.is_causal = true;
        draw(causal);
      }
    }
  }

  void draw(const Case& c) {
    const Weights weights = measure_weights(examiner_, c);
    if (!weights.measured.defined()) return;
    const std::string title =
        base::cat("reach", c.is_causal ? ", causal" : "", c.strategy.empty() ? "" : ", strategy " + c.strategy, ", ",
                  c.cp_size, " ranks");
    report_.pictures.push_back({title, c, weights.mean_measured(), weights.mean_expected()});
  }

  Examiner examiner_;
  const ExamineOptions& options_;
  Report report_;
  int64_t done_ = 0;
  std::map<std::tuple<std::string, int64_t, std::string>, int64_t> diagnosed_;
};

}  // namespace

Report examine(Ranks& ranks, const ExamineOptions& options) { return Examination(ranks, options).run(); }

std::pair<CaseResult, std::optional<Finding>> examine_case(Ranks& ranks, const Case& c) {
  Examiner examiner(ranks);
  const CaseResult result{c, examiner.check(c), kNoFinding};
  const VerdictKind kind = result.verdict.kind;
  if (kind == VerdictKind::kOk || kind == VerdictKind::kRefused) return {result, std::nullopt};
  return {result, diagnose(examiner, c, result.verdict)};
}

Report run(const Target& target, ExamineOptions options) {
  if (options.selection.strategies == std::vector<std::string>{""}) {
    const auto known = contract::known_strategies();
    options.selection.strategies.assign(known.begin(), known.end());
  }
  ThreadRanks ranks(target);
  return examine(ranks, options);
}

}  // namespace ulysses::doctor
