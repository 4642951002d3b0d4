#pragma once

#include "ulysses/kernels/cpu_flash/backward.h"
#include "ulysses/kernels/cpu_flash/forward.h"

namespace ulysses::kernels::flash {
namespace {

template <Type T>
constexpr Instance instance_of() {
  return {forward_sizes<T>, pack<T>,     attend<T>,          backward_sizes<T>,
          pack_backward<T>, dot_rows<T>, attend_backward<T>, finish_dq<T>};
}

}  // namespace
}  // namespace ulysses::kernels::flash
