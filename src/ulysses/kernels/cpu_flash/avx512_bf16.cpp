// bfloat16 for processors with AVX512_BF16. Compiled with flags of its own: see cmake/UlyssesCpuFlash.cmake.
#include "ulysses/kernels/cpu_flash/avx512_words.h"
// After the registers above, whose names it uses.
#include "ulysses/kernels/cpu_flash/instance.h"

namespace ulysses::kernels::flash {

constinit const Instance kAvx512Bfloat16 = instance_of<Type::kBfloat16>();

}  // namespace ulysses::kernels::flash
