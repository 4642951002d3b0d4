#pragma once

#include <ATen/core/Tensor.h>

#include "ulysses/doctor/question.h"

namespace ulysses::doctor {

// Which keys each query may see, by global position: causal, window, packed documents, key mask; joint text in front
// is seen by all.
// Shapes: [B, 1, S, T + S_kv] bool
at::Tensor visible_keys(const Question& question);

struct Reference {
  at::Tensor out;         // [B, S, H, D_v]
  at::Tensor lse;         // [B, H, S]
  at::Tensor dq, dk, dv;  // of ⟨grad_out, out⟩; undefined unless the case asks for backward
};

// The whole question on one process, in plain ATen, computed in `dtype`: in float64 what everything is measured
// against, in the case's own dtype the error that one process would make. Dropout is not applied.
Reference attention_reference(const Question& question, at::ScalarType dtype = at::kDouble);

}  // namespace ulysses::doctor
