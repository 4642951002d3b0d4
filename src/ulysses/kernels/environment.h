#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ulysses/base/error.h"

namespace ulysses::kernels {

// The kernel that a call names, or, where it says "auto", the one that the environment variable ULYSSES_KERNEL names.
std::string requested_kernel(std::string_view name);

// What is wrong with ULYSSES_KERNEL and ULYSSES_CPU_FEATURES. Errors: CP031.
std::vector<base::Problem> environment_problems();

}  // namespace ulysses::kernels
