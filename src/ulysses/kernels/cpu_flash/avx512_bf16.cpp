// bfloat16 for processors with AVX512_BF16. Compiled with flags of its own: see CMakeLists.txt.
#include "ulysses/kernels/cpu_flash/avx512_words.h"
// Behind the registers.
#include "ulysses/kernels/cpu_flash/instance.h"

namespace ulysses::kernels::flash {

constinit const Instance kAvx512Bfloat16 = instance_of<Type::kBfloat16>();

}  // namespace ulysses::kernels::flash
