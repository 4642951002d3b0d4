#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// Which KV head each query head reads: q = k = 0, v = the number of its head.
Diagnosis explain_kv_heads(Examiner& examiner, const Case& c);

// Identity probe: queries and keys are long vectors of one direction per token, so a row returns the value at its own
// token; v holds token, head and sequence numbers, so a row that is elsewhere tells where it came from.
Diagnosis explain_order(Examiner& examiner, const Case& c);

// Which sequence of the batch each sequence sees: v = the number of its sequence, then other keys in one sequence.
Diagnosis explain_batch(Examiner& examiner, const Case& c);

}  // namespace ulysses::doctor
