#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// With q = k = 0 every row of the output is the mean of the values that it sees, and with one value marked the output
// is that key's weight: the reach of every key token, as a number that has a closed form.
struct Weights {
  at::Tensor measured;               // [B, S, H, S_kv]; undefined if the ranks gave nothing to compare
  at::Tensor expected;               // the same of one process; without a mask or sinks 1 / visible keys, or 0
  at::Tensor mean_measured() const;  // [S, S_kv], over batch and heads
  at::Tensor mean_expected() const;
};

// Comm: ceil(S_kv / D_v) questions.
Weights measure_weights(Examiner& examiner, const Case& c);

// What the weights say, if they are not those expected: keys that never arrive, count twice, leak, or give way to
// padding or to text.
Diagnosis explain_weights(const Case& c, const Weights& weights);

// [cp_size, cp_size] bool: whether changing the keys (or values) that rank j holds changes the outputs of rank i.
enum class Changed { kKeys, kValues };
at::Tensor influence(Examiner& examiner, const Case& c, Changed changed);

}  // namespace ulysses::doctor
