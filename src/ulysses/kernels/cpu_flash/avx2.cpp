// float32 and float16 for every processor with AVX2. Compiled with flags of its own: see CMakeLists.txt.
#include "ulysses/kernels/cpu_flash/avx2_words.h"
// Behind the registers.
#include "ulysses/kernels/cpu_flash/instance.h"

namespace ulysses::kernels::flash {

constinit const Instance kAvx2Float32 = instance_of<Type::kFloat32>();
constinit const Instance kAvx2Float16 = instance_of<Type::kFloat16>();

}  // namespace ulysses::kernels::flash
