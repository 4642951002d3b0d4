#pragma once

#include <ATen/core/Tensor.h>

#include "ulysses/doctor/question.h"

namespace ulysses::doctor {

// Which keys each query may see, by place in the joined sequence: causal, window, packed documents, bool mask, and
// joint tokens behind their sequence's end, which see nothing and are seen by nobody. Shapes: [B, H | 1, T + S, T +
// S_kv] bool
at::Tensor visible_keys(const Question& question);

// The whole question's answer, out of the sequence and of the joint tokens.
struct Reference {
  at::Tensor out;         // [B, S, H, D_v]
  at::Tensor lse;         // [B, H, S]
  at::Tensor dq, dk, dv;  // of ⟨grad_out, out⟩ + ⟨grad_lse, lse⟩, text included; undefined unless asked for
  at::Tensor text_out, text_lse;
  at::Tensor text_dq, text_dk, text_dv, dmask, dsinks;
};

// The whole question on one process, in plain ATen, computed in `dtype`: in float64 what everything is measured
// against, in the case's own dtype the error that one process would make. Dropout is not applied.
Reference attention_reference(const Question& question, at::ScalarType dtype = at::kDouble);

// What every query gives to every key, sinks' share left out. Shapes: [B, H, T + S, T + S_kv] float64
at::Tensor attention_weights(const Question& question);

}  // namespace ulysses::doctor
