#include "ulysses/kernels/cpu_flash/features.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ulysses::kernels::flash {

Features processor_features() {
  Features found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  found.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("fma");
  found.avx512_bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1U << 22;
  found.amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0;
#endif
  return found;
}

Features admitted(const Features& found, std::string_view words, std::string* unknown) {
  if (words.empty()) return found;
  Features left;
  while (!words.empty()) {
    const std::string_view word = words.substr(0, words.find(','));
    words.remove_prefix(word.size() < words.size() ? word.size() + 1 : word.size());
    const auto* named = std::ranges::find(kNamedFeatures, word, &NamedFeature::word);
    if (named != std::end(kNamedFeatures)) {
      left.*named->has = found.*named->has;
    } else if (word != "none" && unknown != nullptr && unknown->empty()) {
      *unknown = word;
    }
  }
  return left;
}

Features features() {
  static const Features found = processor_features();
  const char* words = std::getenv("ULYSSES_CPU_FEATURES");
  return words == nullptr ? found : admitted(found, words);
}

const Instance* instance_for([[maybe_unused]] const Features& features, [[maybe_unused]] std::string_view dtype) {
#ifdef ULYSSES_CPU_FLASH_AVX512
  if (features.avx512 && dtype == "float32") return &kAvx512Float32;
  if (features.avx512 && dtype == "float16") return &kAvx512Float16;
#endif
#ifdef ULYSSES_CPU_FLASH_AVX512_BF16
  if (features.avx512 && features.avx512_bf16 && dtype == "bfloat16") return &kAvx512Bfloat16;
#endif
#ifdef ULYSSES_CPU_FLASH_AVX2
  if (features.avx2 && dtype == "float32") return &kAvx2Float32;
  if (features.avx2 && dtype == "float16") return &kAvx2Float16;
#endif
  return nullptr;
}

bool is_first_choice(const Features& features, std::string_view dtype) {
  return !features.amx && instance_for(features, dtype) != nullptr;
}

std::string describe(const Features& features) {
  std::string text;
  for (const NamedFeature& named : kNamedFeatures) {
    const bool goes_without_saying = named.has == &Features::avx2 && features.avx512;
    if (features.*named.has && !goes_without_saying) text.append(text.empty() ? "" : ", ").append(named.shown);
  }
  return text.empty() ? "none of AVX2, AVX-512 and AMX" : text;
}

}  // namespace ulysses::kernels::flash
