#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// Faults of masks, joint tokens, replicated keys, sinks and softcap. Each is a hypothesis: what one process gives when
// it misunderstands one option in one known way. A hypothesis holds where the ranks give exactly those numbers.

// Of the output: the first hypothesis that gives what the ranks give.
Diagnosis explain_options(Examiner& examiner, const Case& c);

// Of lse beside a right output: keys that count several times, sinks left out.
Diagnosis explain_option_lse(Examiner& examiner, const Case& c);

// Of gradients beside a right output: an option that the backward does not know, and gradients of what every rank holds
// that are missing or counted too often.
Diagnosis explain_option_gradients(Examiner& examiner, const Case& c);

}  // namespace ulysses::doctor
