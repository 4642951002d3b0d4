// float32 and float16 for processors with AVX2, FMA and F16C. Compiled with flags of its own: see
// cmake/UlyssesCpuFlash.cmake.
#include "ulysses/kernels/cpu_flash/avx2_words.h"
// After the registers above, whose names it uses.
#include "ulysses/kernels/cpu_flash/instance.h"

namespace ulysses::kernels::flash {

constinit const Instance kAvx2Float32 = instance_of<Type::kFloat32>();
constinit const Instance kAvx2Float16 = instance_of<Type::kFloat16>();

}  // namespace ulysses::kernels::flash
