// bfloat16 for processors with AVX512_BF16. Compiled with flags of its own: see CMakeLists.txt.
#include "ulysses/kernels/cpu_flash/avx512_backward.h"
#include "ulysses/kernels/cpu_flash/avx512_forward.h"

namespace ulysses::kernels::flash {

const Instance kAvx512Bfloat16 = {forward_sizes<Type::kBfloat16>,   pack<Type::kBfloat16>,
                                  attend<Type::kBfloat16>,          backward_sizes<Type::kBfloat16>,
                                  pack_backward<Type::kBfloat16>,   dot_rows<Type::kBfloat16>,
                                  attend_backward<Type::kBfloat16>, finish_dq<Type::kBfloat16>};

}  // namespace ulysses::kernels::flash
