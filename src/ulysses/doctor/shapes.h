#pragma once

#include <span>

#include "ulysses/contract/capability.h"
#include "ulysses/doctor/case.h"

namespace ulysses::doctor {

// A shape in which a feature is used. `shape` changes the plain case; the first of a feature is the quick one.
struct Shape {
  contract::Feature feature;
  void (*shape)(Case&);
};

// At least one for every row of the capability table, in its order.
std::span<const Shape> all_shapes();

}  // namespace ulysses::doctor
