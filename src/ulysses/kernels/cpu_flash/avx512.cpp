// float32 and float16 for every processor with AVX-512. Compiled with flags of its own: see CMakeLists.txt.
#include "ulysses/kernels/cpu_flash/avx512_backward.h"
#include "ulysses/kernels/cpu_flash/avx512_forward.h"

namespace ulysses::kernels::flash {

const Instance kAvx512Float32 = {forward_sizes<Type::kFloat32>,   pack<Type::kFloat32>,
                                 attend<Type::kFloat32>,          backward_sizes<Type::kFloat32>,
                                 pack_backward<Type::kFloat32>,   dot_rows<Type::kFloat32>,
                                 attend_backward<Type::kFloat32>, finish_dq<Type::kFloat32>};

const Instance kAvx512Float16 = {forward_sizes<Type::kFloat16>,   pack<Type::kFloat16>,
                                 attend<Type::kFloat16>,          backward_sizes<Type::kFloat16>,
                                 pack_backward<Type::kFloat16>,   dot_rows<Type::kFloat16>,
                                 attend_backward<Type::kFloat16>, finish_dq<Type::kFloat16>};

}  // namespace ulysses::kernels::flash
