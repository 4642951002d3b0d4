#include "ulysses/doctor/diagnose.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <array>

#include "ulysses/base/text.h"
#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/gradients.h"
#include "ulysses/doctor/numbers.h"
#include "ulysses/doctor/option_faults.h"
#include "ulysses/doctor/order.h"
#include "ulysses/doctor/weights.h"

namespace ulysses::doctor {
namespace {

using base::cat;

// One way to make a case simpler. `right` is what the sentence says where the simpler case is right.
struct Simplification {
  bool (*apply)(Case&);  // false where there is nothing to simplify
  std::string_view right;
};

bool make_equal_shards(Case& c) {
  if (c.has_even_shards()) return false;
  const std::vector<int64_t> kv_lengths = c.kv_lengths;
  set_shards(c, 8);
  if (c.replicated_kv) c.kv_lengths = kv_lengths;
  return true;
}

bool make_equal_lengths(Case& c) {
  if (c.replicated_kv || c.kv_lengths == c.lengths ||
      !std::equal(c.lengths.begin() + 1, c.lengths.end(), c.lengths.begin()))
    return false;
  c.kv_lengths = c.lengths;
  return true;
}

template <auto Member, auto Value>
bool set(Case& c) {
  if (c.*Member == Value) return false;
  c.*Member = Value;
  return true;
}

constexpr std::array kSimplifications = std::to_array<Simplification>({
    {set<&Case::strided, false>, "contiguous inputs are right"},
    {set<&Case::sum_loss, false>, "a gradient that is not one number in memory is right"},
    {[](Case& c) {
       const bool was = c.grad_of != "qkv";
       c.grad_of = "qkv";
       return was;
     },
     "gradients of all of q, k and v are right"},
    {[](Case& c) {
       const bool was = !c.local_axis.empty();
       c.local_axis = "";
       return was;
     },
     "a mask that is whole on every rank is right"},
    {[](Case& c) {
       const bool was = c.additive_mask;
       c.additive_mask = c.mask_grad = false;
       return was;
     },
     "a bool mask is right"},
    {set<&Case::blind_rows, false>, "queries that all see a key are right"},
    {[](Case& c) {
       const bool was = !c.mask.empty();
       clear_mask(c);
       return was;
     },
     "without attn_mask it is right"},
    {[](Case& c) {
       const bool was = !c.text_lens.empty();
       c.text_lens.clear();
       return was;
     },
     "joint tokens that are all real are right"},
    {set<&Case::text_suffix, false>, "joint tokens in front of the sequence are right"},
    {[](Case& c) {
       const bool was = c.text_len > 0;
       clear_text(c);
       return was;
     },
     "without joint tokens it is right"},
    {set<&Case::replicated_kv, false>, "sharded k and v are right"},
    {set<&Case::sinks, false>, "without sinks it is right"},
    {set<&Case::softcap, 0.0>, "without softcap it is right"},
    {set<&Case::lse_grad, false>, "without a gradient through lse it is right"},
    {[](Case& c) {
       const bool was = c.qkv_format != "bshd";
       c.qkv_format = "bshd";
       return was;
     },
     "qkv_format=\"bshd\" is right"},
    {[](Case& c) {
       const bool was = c.batch != 1;
       set_batch(c, 1);
       return was;
     },
     "one sequence alone is right"},
    {make_equal_lengths, "q and k/v of one length are right"},
    {make_equal_shards, "equal shards are right"},
    {[](Case& c) {
       if (c.num_kv_heads == c.num_heads && c.num_heads % c.cp_size == 0) return false;
       c.num_heads = c.num_kv_heads = plain_case(c.cp_size, "").num_heads;
       return true;
     },
     "a multiple of cp_size heads without groups is right"},
    {[](Case& c) {
       if (c.cp_size <= 2) return false;
       const bool equal = c.has_even_shards();
       c.cp_size = 2;
       for (auto* lengths : {&c.lengths, &c.padded_lengths, &c.kv_lengths}) lengths->resize(2);
       if (equal) set_shards(c, 8);
       return true;
     },
     "2 ranks are right"},
    {[](Case& c) {
       const bool was = c.is_causal;
       c.is_causal = c.bottom_right = false;
       return was;
     },
     "attention that is not causal is right"},
    {[](Case& c) {
       if (c.dtype == "float32") return false;
       c.dtype = "float32";
       return true;
     },
     "float32 is right"},
    {[](Case& c) {
       const bool was = c.return_lse;
       c.return_lse = c.lse_grad = false;
       return was;
     },
     ""},
    {set<&Case::dropout_p, 0.0>, "without dropout it is right"},
    {[](Case& c) {
       const bool was = c.softmax_scale != 0;
       c.softmax_scale = 0;
       return was;
     },
     "the default softmax_scale is right"},
    {set<&Case::backward, false>, ""},
});

struct Reduced {
  Case c;
  std::vector<std::string_view> rights;
};

// The simplest case that is still wrong in the same way (its output, or its gradients alone), and what makes it right.
Reduced reduce(Examiner& examiner, const Case& c, bool is_forward) {
  Reduced reduced{c, {}};
  for (const Simplification& step : kSimplifications) {
    Case simpler = reduced.c;
    if (!step.apply(simpler)) continue;
    const Verdict verdict = examiner.check(simpler);
    if (verdict.kind == VerdictKind::kWrong && verdict.is_forward == is_forward) {
      reduced.c = simpler;
    } else if (verdict.kind == VerdictKind::kOk && !step.right.empty()) {
      reduced.rights.push_back(step.right);
    }
  }
  return reduced;
}

// A fault of the values alone and one of the keys alone look alike where every value is marked and every key is zero.
Finding refine_local(Examiner& examiner, const Case& c, Finding finding) {
  const at::Tensor by_keys = influence(examiner, c, Changed::kKeys);
  for (int64_t qr = 0; qr < c.cp_size; ++qr)
    for (int64_t kr = 0; kr < c.cp_size; ++kr)
      if (qr != kr && by_keys[qr][kr].item<bool>()) {
        finding.kind = "values_local";
        finding.sentence = cat("v is not gathered although k is: the keys of rank ", kr,
                               " influence the queries of rank ", qr, ", their values don't (", finding.sentence, ")");
        return finding;
      }
  return finding;
}

Diagnosis explain_keys(Examiner& examiner, const Case& c) {
  if (c.is_causal || c.cp_size < 2 || c.window > 0 || c.num_documents > 1 || c.has_extras()) return std::nullopt;
  const at::Tensor by_keys = influence(examiner, c, Changed::kKeys);
  for (int64_t qr = 0; qr < c.cp_size; ++qr)
    for (int64_t kr = 0; kr < c.cp_size; ++kr)
      if (c.lengths[static_cast<size_t>(qr)] > 0 && c.kv_lengths[static_cast<size_t>(kr)] > 0 &&
          !by_keys[qr][kr].item<bool>())
        return Finding{"keys_local",
                       cat("k is not gathered: the keys of rank ", kr, " never influence the queries of rank ", qr,
                           ", although their values do"),
                       {}};
  return std::nullopt;
}

Diagnosis explain_reach(Examiner& examiner, const Case& c) {
  Diagnosis found = explain_weights(c, measure_weights(examiner, c));
  if (found && found->kind == "local_only") return refine_local(examiner, c, *found);
  return found;
}

Finding dropout_finding(const Verdict& verdict) {
  return {verdict.tensor == "dv" ? "dropout_backward" : "dropout", cat("with dropout ", verdict.message), {}};
}

Finding explain(Examiner& examiner, const Case& c) {
  using Explain = Diagnosis (*)(Examiner&, const Case&);
  // More than one sequence are left only where one alone is not wrong: the batch comes before the keys.
  constexpr Explain kForward[] = {explain_state,    explain_batch, explain_options, explain_reach,
                                  explain_kv_heads, explain_order, explain_values,  explain_keys};
  if (c.dropout_p > 0)  // chance differs from call to call; what the gradients belong to does not
    return dropout_finding(examiner.check(c));
  Case forward = forward_only(c);
  forward.return_lse = forward.lse_grad = false;
  const Verdict verdict = examiner.check(forward);
  if (verdict.kind == VerdictKind::kWrong) {
    for (const Explain& look : kForward)
      if (Diagnosis found = look(examiner, forward)) return *found;
    return {
        "numbers", cat("the numbers are wrong although every key reaches every query in order: ", verdict.message), {}};
  }
  for (const Explain& look :
       {explain_state, explain_option_lse, explain_lse, explain_option_gradients, explain_gradients})
    if (Diagnosis found = look(examiner, c)) return *found;
  return {"numbers", examiner.check(c).message, {}};
}

std::string kind_of_form(const Observation& seen) {
  if (seen.failure.message.find("[CP053]") != std::string::npos) return "kv_content";
  for (const RankAnswer& answer : seen.answers)
    if (answer.violation.find("writes to its input") != std::string::npos) return "input_written";
  return "form";
}

}  // namespace

Diagnosis explain_state(Examiner& examiner, const Case& c) {
  const Question a = make_question(c, /*seed=*/3), b = make_question(c, /*seed=*/4);
  const Observation first = examiner.observe(a), second = examiner.observe(a);
  examiner.observe(b);
  const Observation third = examiner.observe(a);
  if (!first.complete() || !second.complete() || !third.complete()) return std::nullopt;
  const bool wrong = judge(a, second).kind != VerdictKind::kOk;
  const auto same = [&](const Observation& other) {
    // NaN differs from itself, and is no matter of state.
    return at::equal(first.out.nan_to_num(), other.out.nan_to_num());
  };
  if (same(second) && same(third)) return std::nullopt;
  const Observation& other = same(second) ? third : second;
  const double difference = (first.out - other.out).abs().max().item<double>();
  if (!same(second))
    return Finding{"state",
                   cat("the second call with the same inputs gives other numbers than the first, by ", difference,
                       judge(a, first).kind == VerdictKind::kOk && wrong ? ": the first is right" : ""),
                   {}};
  return Finding{
      "state",
      cat("a call leaves something behind for the next: inputs A, B, A give other numbers for A, by ", difference),
      {}};
}

Finding diagnose(Examiner& examiner, const Case& c, const Verdict& verdict) {
  if (verdict.kind != VerdictKind::kWrong)
    return {std::string(to_string(verdict.kind)), cat(c.feature, " on ", c.cp_size, " ranks: ", verdict.message), {}};
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  const Verdict again = judge(question, seen);
  if (again.kind == VerdictKind::kOk)
    return {"state", cat("not the same from call to call: wrong once, right when asked again: ", verdict.message), {}};
  if (!seen.complete()) return {kind_of_form(seen), seen.failure.message, {}};
  if (again.kind == VerdictKind::kWrong && again.tensor.empty()) return {"form", again.message, {}};
  const Reduced reduced = reduce(examiner, c, verdict.is_forward);
  Finding finding = explain(examiner, reduced.c);
  if (!reduced.rights.empty()) finding.sentence += cat(" (", base::join(reduced.rights, "; "), ")");
  return finding;
}

}  // namespace ulysses::doctor
