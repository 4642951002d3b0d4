#pragma once

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// Why a case is not ok, from what the target answers to further questions. First the case is made as simple as it can
// be while it stays wrong (one sequence, two ranks, equal shards, …); what makes it right is part of the sentence.
Finding diagnose(Examiner& examiner, const Case& c, const Verdict& verdict);

// Same question, same bits, whatever was asked in between: A, A, B, A.
Diagnosis explain_state(Examiner& examiner, const Case& c);

}  // namespace ulysses::doctor
