// explain_option_lse and explain_option_gradients: hypotheses beside a right output.
#include <algorithm>
#include <array>
#include <cmath>

#include "ulysses/base/text.h"
#include "ulysses/doctor/gradients.h"
#include "ulysses/doctor/option_faults.h"
#include "ulysses/doctor/tensors.h"

namespace ulysses::doctor {
namespace {

using base::cat;

// What the backward may not know of.
struct Forgotten {
  std::string_view name;
  bool (*applies)(const Case& c);
  void (*forget)(Question& question);
};

constexpr std::array kForgotten = std::to_array<Forgotten>({
    {"attn_mask", [](const Case& c) { return !c.mask.empty(); }, drop_mask},
    {"sinks", [](const Case& c) { return c.sinks; }, drop_sinks},
    {"softcap", [](const Case& c) { return c.softcap != 0; }, [](Question& question) { question.c.softcap = 0; }},
    {"joint_valid_lens", [](const Case& c) { return !c.text_lens.empty(); },
     [](Question& question) { question.c.text_lens.clear(); }},
});

double difference(const Observation& seen, const Reference& other) {
  return std::max({largest(seen.dq - other.dq), largest(seen.dk - other.dk), largest(seen.dv - other.dv)});
}

Diagnosis explain_lse_gradient(const Question& question, const Observation& seen, double close) {
  if (!question.c.lse_grad) return std::nullopt;
  Question other = question;
  other.c.lse_grad = false;
  if (difference(seen, attention_reference(other)) > close) return std::nullopt;
  return Finding{"lse_gradient",
                 cat("the gradient through lse is dropped: dq and dk are those of a loss that does not depend on lse, "
                     "off by ",
                     difference(seen, attention_reference(question))),
                 {}};
}

}  // namespace

Diagnosis explain_option_lse(Examiner& examiner, const Case& c) {
  if (!c.return_lse || !c.has_extras()) return std::nullopt;
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  if (!seen.complete()) return std::nullopt;
  const at::Tensor wanted = by_tokens(attention_reference(question).lse);
  const at::Tensor off = (seen.lse - wanted).masked_fill(wanted.isneginf(), 0);
  const double times = std::log(static_cast<double>(c.cp_size));
  if (c.cp_size > 1 && largest((off - times).masked_fill(wanted.isneginf(), 0)) < 1e-3) {
    const Question equal = uniform_question(c, at::ones_like(question.v));
    const Observation mean = examiner.observe(equal);
    if (!mean.complete()) return std::nullopt;
    const auto first = [](const at::Tensor& lse) { return lse[0][0][0][0].item<double>(); };
    const double right = first(by_tokens(attention_reference(equal).lse)), got = first(mean.lse);
    return Finding{
        "lse_counts_twice",
        cat("every key counts ", c.cp_size,
            " times in lse, as when keys that every rank holds are gathered: ", "with equal scores it is ", got,
            " (ln ", std::llround(std::exp(got)), ") instead of ", right, " (ln ", std::llround(std::exp(right)), ")"),
        {}};
  }
  if (!c.sinks) return std::nullopt;
  Question without = question;
  drop_sinks(without);
  if (largest(seen.lse - by_tokens(attention_reference(without).lse)) > 1e-3) return std::nullopt;
  return Finding{"lse_sinks", cat("lse leaves the sinks out: off by ", largest(off)), {}};
}

Diagnosis explain_option_gradients(Examiner& examiner, const Case& c) {
  if (!c.backward || !(c.has_extras() || c.lse_grad)) return std::nullopt;
  const Question question = make_question(c);
  const Observation seen = examiner.observe(question);
  if (!seen.complete()) return std::nullopt;
  const Reference wanted = attention_reference(question);
  const double size = std::max({1.0, largest(wanted.dq), largest(wanted.dk), largest(wanted.dv)});
  const double close = (c.dtype.ends_with("16") ? 5e-2 : 1e-3) * size;
  const double off = difference(seen, wanted);
  if (off > close) {
    if (Diagnosis found = explain_lse_gradient(question, seen, close)) return found;
    for (const Forgotten& option : kForgotten) {
      if (!option.applies(c)) continue;
      Question other = question;
      option.forget(other);
      if (difference(seen, attention_reference(other)) > close) continue;
      return Finding{"option_backward",
                     cat("the backward leaves ", option.name, " out: dq, dk and dv are those of a forward without it, ",
                         "off by ", off),
                     {}};
    }
  }
  std::vector<std::pair<std::string, double>> factors;
  const auto add = [&](std::string_view name, const at::Tensor& got, const at::Tensor& right) {
    if (got.defined()) factors.emplace_back(name, gradient_factor(got, right, close / size));
  };
  add("joint q", seen.text_dq, wanted.text_dq);
  add("joint k", seen.text_dk, wanted.text_dk);
  add("joint v", seen.text_dv, wanted.text_dv);
  add("attn_mask", seen.dmask, wanted.dmask);
  add("sinks", seen.dsinks, wanted.dsinks);
  return explain_factors(c, factors);
}

}  // namespace ulysses::doctor
