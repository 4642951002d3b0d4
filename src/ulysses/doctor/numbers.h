#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// For outputs whose keys and order are right and whose values are not: another softmax scale, arithmetic in 16 bits,
// scores that overflow, an input that is read as if it were contiguous.
Diagnosis explain_values(Examiner& examiner, const Case& c);

// An lse in another base, or of other keys.
Diagnosis explain_lse(Examiner& examiner, const Case& c);

}  // namespace ulysses::doctor
