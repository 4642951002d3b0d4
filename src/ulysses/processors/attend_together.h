#pragma once

#include <functional>

#include "ulysses/exchange/group.h"
#include "ulysses/kernels/kernel.h"

namespace ulysses::processors {

// Runs this rank's `attend` and tells the others how it ended, before they wait for its output: every rank raises or
// none does, and the group stays usable.
// Comm:   one small all-gather, two when a rank failed. Every rank of the group must call it.
// Errors: what `attend` raised, on the rank where it did; CP067 with the first line of it on the others.
kernels::KernelOutput attend_together(const exchange::Group& group,
                                      const std::function<kernels::KernelOutput()>& attend);

}  // namespace ulysses::processors
