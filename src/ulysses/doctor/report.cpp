#include "ulysses/doctor/report.h"

#include <algorithm>
#include <array>

#include "ulysses/base/text.h"

namespace ulysses::doctor {

std::string_view to_string(ProbeVerdict verdict) {
  constexpr std::array<std::string_view, 4> kNames = {"ok", "wrong", "refused", "not_applicable"};
  return kNames[static_cast<size_t>(verdict)];
}

int64_t Report::count(VerdictKind kind) const {
  return std::count_if(cases.begin(), cases.end(),
                       [&](const CaseResult& result) { return result.verdict.kind == kind; });
}

bool Report::passed() const {
  const bool cases_pass = count(VerdictKind::kOk) + count(VerdictKind::kRefused) == std::ssize(cases);
  return cases_pass && findings.empty() && std::none_of(probes.begin(), probes.end(), [](const ProbeResult& probe) {
           return probe.verdict == ProbeVerdict::kWrong;
         });
}

std::string Report::text() const {
  std::string text;
  for (const Finding& finding : findings)
    text += base::cat(finding.sentence, " [checklist point ", finding.checklist_point(), ", ", finding.anchor(), "]\n");
  std::vector<std::string> counts;
  for (const VerdictKind kind : {VerdictKind::kOk, VerdictKind::kRefused, VerdictKind::kWrong, VerdictKind::kCrashed,
                                 VerdictKind::kHung, VerdictKind::kOneRankOnly, VerdictKind::kUnclearMessage})
    if (const int64_t number = count(kind); number > 0) counts.push_back(base::cat(number, " ", to_string(kind)));
  return base::cat(text, base::join(counts), passed() ? ": passed\n" : ": NOT passed\n");
}

}  // namespace ulysses::doctor
