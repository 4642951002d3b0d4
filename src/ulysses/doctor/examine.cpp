#include "ulysses/doctor/examine.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <tuple>

#include "ulysses/base/text.h"
#include "ulysses/contract/capability.h"
#include "ulysses/doctor/diagnose.h"
#include "ulysses/doctor/probes.h"
#include "ulysses/doctor/weights.h"
#include "ulysses/transports/thread/keep_num_threads.h"

namespace ulysses::doctor {
namespace {

const std::string kPlain = "equal_shards";

// Questions are small: more than one thread for them costs more than it gives, and much more beside busy neighbours.
struct OneThread {
  const transports::KeepNumThreads keep;
  OneThread() { at::set_num_threads(1); }
};

// What of a wrong case is wrong: one fault does not explain a wrong output and wrong gradients of a right one.
enum class Side { kForm, kForward, kBackward };

Side side_of(const Verdict& verdict) {
  if (verdict.tensor.empty()) return Side::kForm;
  return verdict.is_forward ? Side::kForward : Side::kBackward;
}

bool is_of_backward(const Finding& finding) {
  return finding.kind.starts_with("gradient") || finding.kind == "no_gradient" || finding.kind == "other_backward" ||
         finding.kind == "dropout_backward" || finding.kind == "lse_gradient" || finding.kind == "option_backward";
}

// Rows of a feature that may be wrong for a reason of their own; the plain case's is the name of its feature.
std::string variant_of(const Case& c) {
  if (c == plain_case(c.cp_size, c.strategy)) return kPlain;
  return base::cat(c.feature, "-", c.dtype, c.strided ? "-strided" : "", c.magnitude != 1 ? "-large" : "",
                   c.backward ? "" : "-forward", c.is_causal ? "-causal" : "", "-D", c.head_dim, "-", c.grad_of,
                   c.sum_loss ? "-sum" : "", extras_text(c));
}

// Findings of one signature are one finding: of one kind and, where the sentence is a message, of one message, numbers
// aside.
std::string signature(const Finding& finding) {
  constexpr std::array<std::string_view, 6> kMessages = {"form", "kv_content",    "crashed",
                                                         "hung", "one_rank_only", "unclear_message"};
  if (std::find(kMessages.begin(), kMessages.end(), finding.kind) == kMessages.end()) return finding.kind;
  const size_t colon = finding.sentence.find(": ");  // behind "uneven_heads on 2 ranks" or "rank 1"
  std::string text = finding.kind + (colon == std::string::npos ? finding.sentence : finding.sentence.substr(colon));
  std::erase_if(text, [](unsigned char letter) { return std::isdigit(letter) != 0; });
  constexpr size_t kTelling = 80;  // behind it a message goes on about every rank
  return text.substr(0, kTelling);
}

// A case, and its forward alone where backward is refused: that must not hide a forward that is wrong.
std::vector<CaseResult> ask_both(Examiner& examiner, const Case& c) {
  std::vector<CaseResult> results = {{c, examiner.check(c), kNoFinding}};
  const VerdictKind kind = results[0].verdict.kind;
  if (!c.backward || (kind != VerdictKind::kRefused && kind != VerdictKind::kUnclearMessage)) return results;
  const Case forward = forward_only(c);
  const Verdict alone = examiner.check(forward);
  if (alone.kind == VerdictKind::kOk || alone.kind == VerdictKind::kWrong)
    results.push_back({forward, alone, kNoFinding});
  return results;
}

class Examination {
 public:
  Examination(Ranks& ranks, const ExamineOptions& options) : examiner_(ranks), options_(options) {}

  Report run() {
    if (options_.probes) run_probes();
    const std::vector<Case> cases = make_cases(options_.selection);
    int64_t done = 0;
    for (const Case& c : cases) {
      ++done;
      for (CaseResult& result : hangs(c) ? not_asked(c) : ask_both(examiner_, c)) {
        if (result.verdict.kind == VerdictKind::kHung) ++hung_[{c.strategy, c.cp_size}];
        result.finding = finding_of(result);
        report_.cases.push_back(result);
        if (options_.on_case) options_.on_case(result, done, std::ssize(cases));
      }
    }
    accuse_if_nothing_is_served();
    return std::move(report_);
  }

 private:
  // Each hang costs seconds: after three of a strategy and number of ranks the rest would say the same.
  bool hangs(const Case& c) {
    constexpr int64_t kEnough = 3;
    return hung_[{c.strategy, c.cp_size}] >= kEnough;
  }

  static std::vector<CaseResult> not_asked(const Case& c) {
    Verdict verdict;
    verdict.kind = VerdictKind::kHung;
    verdict.message = "not asked: three cases before it gave no answer";
    return {{c, verdict, kNoFinding}};
  }

  int64_t add(Finding finding, const std::string& case_id) {
    auto& findings = report_.findings;
    auto found = std::find_if(findings.begin(), findings.end(),
                              [&](const Finding& known) { return signature(known) == signature(finding); });
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
    const Side side = side_of(result.verdict);
    const Key own = {c.strategy, c.cp_size, variant_of(c), side};
    for (const Key& key : {Key{c.strategy, c.cp_size, kPlain, side}, own})
      if (const auto known = diagnosed_.find(key); known != diagnosed_.end()) {
        report_.findings[static_cast<size_t>(known->second)].cases.push_back(id);
        return known->second;
      }
    return diagnosed_[own] = add(diagnose(examiner_, c, result.verdict), id);
  }

  // The finding of the plain case, if it is wrong: a state that calls leave behind, which explains whatever is wrong,
  // else its diagnosis.
  int64_t cause_of(const Case& plain, int64_t state) {
    const auto key = [&](Side side) { return Key{plain.strategy, plain.cp_size, kPlain, side}; };
    if (state != kNoFinding) {
      for (const Side side : {Side::kForm, Side::kForward, Side::kBackward}) diagnosed_[key(side)] = state;
      return state;
    }
    const Verdict verdict = examiner_.check(plain);
    if (verdict.kind != VerdictKind::kWrong) return kNoFinding;
    return diagnosed_[key(side_of(verdict))] = add(diagnose(examiner_, plain, verdict), "");
  }

  void run_probes() {
    for (const int64_t cp_size : options_.selection.worlds) {
      for (const std::string& strategy : strategies_of(options_.selection)) {
        const Case plain = plain_case(cp_size, strategy);
        if (examiner_.check(forward_only(plain)).kind == VerdictKind::kHung) continue;  // no probe would say more
        int64_t cause = kNoFinding;  // what is wrong with the plain case explains what probes of it find
        for (const Probe& probe : all_probes()) {
          ProbeResult result{std::string(probe.name), strategy, cp_size, ProbeVerdict::kOk, "", kNoFinding};
          if (Diagnosis found = probe.run(examiner_, plain, result)) {
            result.verdict = ProbeVerdict::kWrong;
            result.detail = found->sentence;
            result.finding = explains(cause, *found) ? cause : add(*found, "");
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

  // A wrong backward of the plain case is no reason for an output that is wrong.
  bool explains(int64_t cause, const Finding& found) const {
    if (cause == kNoFinding) return false;
    return !is_of_backward(report_.findings[static_cast<size_t>(cause)]) || is_of_backward(found);
  }

  // Refusals are clean one by one; a target that refuses even the plain call has proved nothing.
  void accuse_if_nothing_is_served() {
    const auto is_refused = [](const CaseResult& result) { return result.verdict.kind == VerdictKind::kRefused; };
    if (!std::all_of(report_.cases.begin(), report_.cases.end(), is_refused)) return;
    for (const CaseResult& result : report_.cases)
      if (result.c.feature == kPlain) {
        add({"nothing_served", base::cat("not even the plain call is served: ", result.verdict.message), {}},
            result.c.id());
        return;
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
  using Key = std::tuple<std::string, int64_t, std::string, Side>;  // strategy, cp_size, feature, what is wrong
  std::map<Key, int64_t> diagnosed_;
  std::map<std::pair<std::string, int64_t>, int64_t> hung_;  // cases that gave no answer
};

}  // namespace

Report examine(Ranks& ranks, const ExamineOptions& options) {
  const OneThread one_thread;
  return Examination(ranks, options).run();
}

std::vector<ExaminedCase> examine_case(Ranks& ranks, const Case& c) {
  const OneThread one_thread;
  Examiner examiner(ranks);
  std::vector<ExaminedCase> examined;
  for (const CaseResult& result : ask_both(examiner, c)) {
    const VerdictKind kind = result.verdict.kind;
    const bool is_fine = kind == VerdictKind::kOk || kind == VerdictKind::kRefused;
    examined.push_back({result, is_fine ? std::nullopt : Diagnosis(diagnose(examiner, result.c, result.verdict))});
  }
  return examined;
}

Report run(const Target& target, ExamineOptions options) {
  if (options.selection.strategies.empty()) {
    const auto known = contract::known_strategies();
    options.selection.strategies.assign(known.begin(), known.end());
  }
  ThreadRanks ranks(target);
  return examine(ranks, options);
}

}  // namespace ulysses::doctor
