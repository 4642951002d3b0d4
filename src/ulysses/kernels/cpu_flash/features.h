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

// The features by their words in ULYSSES_CPU_FEATURES, and as they are shown.
struct NamedFeature {
  std::string_view word, shown;
  bool Features::*has;
};
inline constexpr NamedFeature kNamedFeatures[] = {{"avx2", "AVX2", &Features::avx2},
                                                  {"avx512", "AVX-512", &Features::avx512},
                                                  {"avx512_bf16", "AVX512_BF16", &Features::avx512_bf16},
                                                  {"amx", "AMX", &Features::amx}};

Features processor_features();

// The features of `found` that a list such as "avx512,avx512_bf16" or "none" leaves; an empty list leaves all.
// `unknown`, where given, is set to the first word that names no feature.
Features admitted(const Features& found, std::string_view words, std::string* unknown = nullptr);

// processor_features() that the environment variable ULYSSES_CPU_FEATURES admits: how to test on this processor what
// another would run.
Features features();

// The code for a dtype ("float32", "float16", "bfloat16") that a processor can run, or nullptr.
const Instance* instance_for(const Features& features, std::string_view dtype);

// Whether "auto" takes it. Not beside AMX, which torch's op uses and where nothing is measured. Measured on one Zen 5
// (torch 2.13, one thread, D 64 and 128): the least ratio to torch's op over S 256 to 4096, float16 forward to 1024,
// backward 256. AVX2, torch held to it by ATEN_CPU_CAPABILITY=avx2: float32 1.18 forward, 1.10 backward; float16 1.7,
// 14. AVX-512: float32 2.3, 2.0; float16 3.2, 25; bfloat16 4.3, 2.3.
bool is_first_choice(const Features& features, std::string_view dtype);

std::string describe(const Features& features);

}  // namespace ulysses::kernels::flash
