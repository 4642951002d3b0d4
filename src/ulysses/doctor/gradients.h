#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ulysses/doctor/examiner.h"

namespace ulysses::doctor {

// For a forward that is right and gradients that are not. Backward is linear in grad_out, so the queries of one rank at
// a time show which ranks' queries contribute to the gradients of whose keys, and with what factor.
Diagnosis explain_gradients(Examiner& examiner, const Case& c);

// c if got ≈ c · wanted, 0 if got is zero, NaN if neither; 1 where nothing is wanted.
double gradient_factor(const at::Tensor& got, const at::Tensor& wanted, double tolerance);

// One sentence for gradients, by name, whose factor is a number other than 1; none if there are none.
Diagnosis explain_factors(const Case& c, const std::vector<std::pair<std::string, double>>& factors);

}  // namespace ulysses::doctor
