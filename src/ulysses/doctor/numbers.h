#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// For outputs whose keys and order are right and whose values are not: another softmax scale, coarser arithmetic than
// the dtype's, scores that overflow.
Diagnosis explain_values(Examiner& examiner, const Case& c);

// An lse in another base, or of other keys.
Diagnosis explain_lse(Examiner& examiner, const Case& c);

}  // namespace ulysses::doctor
