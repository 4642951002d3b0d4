#pragma once

#include <string>
#include <string_view>

#include "ulysses/kernels/cpu_flash/call.h"

namespace ulysses::kernels::flash {

// What our CPU kernel asks of a processor.
struct Features {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, DQ, BW and VL, with the operating system's consent
  bool avx512_bf16 = false;
  bool amx = false;  // tiles for bfloat16
  bool operator==(const Features&) const = default;
};

Features processor_features();

// The features of `found` that a list such as "avx512,avx512_bf16" or "none" leaves; an empty list leaves all.
// `unknown`, where given, is set to the first word that names no feature.
Features admitted(const Features& found, std::string_view words, std::string* unknown = nullptr);

// processor_features() that the environment variable ULYSSES_CPU_FEATURES admits: how to test on this processor what
// another would run.
Features features();

// The code for a dtype ("float32", "float16", "bfloat16") that a processor can run, or nullptr.
const Instance* instance_for(const Features& features, std::string_view dtype);

// Whether "auto" takes it: where it was measured to be faster than torch's op. Not beside AMX, which torch's op uses.
// Measured on Zen 5 (torch 2.13, one thread, least ratio over S 256 to 4096, D 64 and 128), AVX2 with
// ATEN_CPU_CAPABILITY=avx2: float32 forward 1.18, backward 1.10; float16 1.7 and 14. AVX-512: 2.3 and 2.1; 3.2 and 25.
bool is_first_choice(const Features& features, std::string_view dtype);

std::string describe(const Features& features);

}  // namespace ulysses::kernels::flash
