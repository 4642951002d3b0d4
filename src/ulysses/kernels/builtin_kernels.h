#pragma once

#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// The kernels of this library, one object each. Callers go through all_kernels() and find_kernel(); the registry and
// the tests name them here.
const Kernel& math_kernel();
const Kernel& cpu_flash_kernel();
const Kernel& fused_cpu_kernel();
const Kernel& cuda_flash_kernel();
const Kernel& cuda_efficient_kernel();
const Kernel& cuda_cudnn_kernel();

}  // namespace ulysses::kernels
