#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// For a forward that is right and gradients that are not. Backward is linear in grad_out, so the queries of one rank at
// a time show which ranks' queries contribute to the gradients of whose keys, and with what factor.
Diagnosis explain_gradients(Examiner& examiner, const Case& c);

}  // namespace ulysses::doctor
