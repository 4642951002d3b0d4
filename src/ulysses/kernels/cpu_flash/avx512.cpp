// float32 and float16 for every processor with AVX-512. Compiled with flags of its own: see CMakeLists.txt.
#include "ulysses/kernels/cpu_flash/avx512_words.h"
// Behind the registers.
#include "ulysses/kernels/cpu_flash/instance.h"

namespace ulysses::kernels::flash {

constinit const Instance kAvx512Float32 = instance_of<Type::kFloat32>();
constinit const Instance kAvx512Float16 = instance_of<Type::kFloat16>();

}  // namespace ulysses::kernels::flash
