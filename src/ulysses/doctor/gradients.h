#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// For a forward that is right and gradients that are not. Backward is linear in grad_out, so the queries of one rank at
// a time show which ranks' queries contribute to the gradients of whose keys, and with what factor.
Diagnosis explain_gradients(Examiner& examiner, const Case& c);

// For a fixed forward, attention is linear in v: ⟨dv, v⟩ = ⟨grad_out, out⟩, whatever the weights are, dropout too.
// Finds a backward that belongs to another forward without knowing the right values.
struct Duality {
  bool complete = false;
  double of_values = 0, of_output = 0;  // ⟨dv, v⟩, ⟨grad_out, out⟩
  double allowed = 0;
  bool holds() const;
};
Duality measure_duality(Examiner& examiner, const Case& c);
Finding duality_finding(const Duality& duality);

}  // namespace ulysses::doctor
