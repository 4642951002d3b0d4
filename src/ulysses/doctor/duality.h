#pragma once

#include "ulysses/doctor/verdict.h"

namespace ulysses::doctor {

// For a fixed forward, attention is linear in v: ⟨dv, v⟩ = ⟨grad_out, out⟩, whatever the weights are, dropout too.
// Joint tokens count on both sides. Finds a backward that belongs to another forward without knowing the right values.
struct Duality {
  bool complete = false;  // both sides are known and finite
  double of_values = 0;   // ⟨dv, v⟩
  double of_output = 0;   // ⟨grad_out, out⟩
  double allowed = 0;     // how far they may be apart
  bool holds() const;
  std::string text() const;  // what it means that it does not hold, with both numbers
};

Duality duality_of(const Question& question, const Observation& seen);

}  // namespace ulysses::doctor
