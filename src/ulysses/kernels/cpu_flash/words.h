#pragma once

// What every width of register shares. A word is 4 bytes of the summed dimension: two bfloat16 or one float32.
// Included only by files that are compiled for one set of processor features, hence the unnamed namespace and no
// template of std: a copy of either must not be one that the linker may choose for code that runs on every processor.
#include <math.h>
#include <string.h>

#include "ulysses/kernels/cpu_flash/call.h"

#define ULYSSES_UNROLL _Pragma("GCC unroll 16")
#define ULYSSES_INLINE inline __attribute__((always_inline))

namespace ulysses::kernels::flash {
namespace {

enum class Type { kFloat32, kFloat16, kBfloat16 };

using Word = uint32_t;

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.44269504F;

template <Type T>
constexpr int kPerWord = T == Type::kBfloat16 ? 2 : 1;
template <Type T>
constexpr int64_t kBytes = T == Type::kFloat32 ? 4 : 2;

ULYSSES_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
ULYSSES_INLINE int64_t clamped(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
ULYSSES_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <Type T>
ULYSSES_INLINE int64_t words_of(int64_t elements) {
  return divide_up(elements, kPerWord<T>);
}

// Where row `token` of a head starts.
template <Type T>
ULYSSES_INLINE const char* row_of(const Rows& x, int64_t batch, int64_t head, int64_t token) {
  return static_cast<const char*>(x.data) + (batch * x.batch + head * x.head + token * x.token) * kBytes<T>;
}
template <Type T>
ULYSSES_INLINE char* row_of(const MutableRows& x, int64_t batch, int64_t head, int64_t token) {
  return static_cast<char*>(x.data) + (batch * x.batch + head * x.head + token * x.token) * kBytes<T>;
}

}  // namespace
}  // namespace ulysses::kernels::flash
