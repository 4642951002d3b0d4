#pragma once

// Registers of 8 lanes, for files that are compiled for AVX2, FMA and F16C. avx512_words.h has the same names. Types
// are float32 and float16: a head_dim is a multiple of 16, so that rows fill their registers and no load stops short.
#include <immintrin.h>

#include "ulysses/kernels/cpu_flash/words.h"

#define ULYSSES_CPU_FLASH_WORDS

namespace ulysses::kernels::flash {
namespace {

using Floats = __m256;
using Words = __m256i;
using Mask = __m256;

constexpr int64_t kLanes = 8;
constexpr int kRows = 4;  // rows of a register tile: 4 × 3 accumulators of 16 registers

ULYSSES_INLINE Words lane_numbers() { return _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0); }
ULYSSES_INLINE Mask first_lanes(int64_t n) {
  const Words count = _mm256_set1_epi32(static_cast<int>(clamped(n, 0, kLanes)));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane_numbers()));
}
ULYSSES_INLINE Mask lanes_from(int64_t first) {
  const Words before = _mm256_set1_epi32(static_cast<int>(clamped(first, 0, kLanes)) - 1);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(lane_numbers(), before));
}
ULYSSES_INLINE Mask greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
ULYSSES_INLINE Mask not_equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ); }
ULYSSES_INLINE Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
ULYSSES_INLINE bool is_any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }
ULYSSES_INLINE Floats select(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }

ULYSSES_INLINE Floats in_all(float x) { return _mm256_set1_ps(x); }
ULYSSES_INLINE Words in_all(Word x) { return _mm256_set1_epi32(static_cast<int>(x)); }
ULYSSES_INLINE Floats load(const float* from) { return _mm256_loadu_ps(from); }
ULYSSES_INLINE void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
ULYSSES_INLINE Words load(const Word* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
ULYSSES_INLINE void store(Word* to, Words x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
// The first `count` of 8 lanes, `otherwise` in the rest.
ULYSSES_INLINE Floats load_some(const float* from, int64_t count, float otherwise) {
  const Mask mask = first_lanes(count);
  return select(mask, _mm256_maskload_ps(from, _mm256_castps_si256(mask)), in_all(otherwise));
}

ULYSSES_INLINE Floats higher(Floats a, Floats b) { return _mm256_max_ps(a, b); }
ULYSSES_INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
ULYSSES_INLINE Floats multiply_subtract(Floats a, Floats b, Floats less) { return _mm256_fmsub_ps(a, b, less); }
ULYSSES_INLINE float sum_of(Floats x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The exponents of normal numbers and of infinity. NaN stays: both operations return their second operand then.
constexpr float kLeastExponent = -126.0F, kMostExponent = 128.0F;
ULYSSES_INLINE Floats exponent_of(Floats x) {
  return _mm256_min_ps(in_all(kMostExponent), _mm256_max_ps(in_all(kLeastExponent), x));
}
// x − floor(x), and x · 2^floor(y) for an x of [1, 2]: exactly 0 for y = −inf, and below normal numbers.
ULYSSES_INLINE Floats fraction_of(Floats x) { return exponent_of(x) - _mm256_floor_ps(exponent_of(x)); }
ULYSSES_INLINE Floats scaled_by_exp2(Floats x, Floats y) {
  const Words power = _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(exponent_of(y))), 23);
  const Floats scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), power));
  return _mm256_andnot_ps(_mm256_cmp_ps(y, in_all(kLeastExponent), _CMP_LT_OQ), scaled);
}

// 8 elements of a row as floats.
template <Type T>
ULYSSES_INLINE Floats load_floats(const char* at) {
  if constexpr (T == Type::kFloat16) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
}
template <Type T>
ULYSSES_INLINE void store_floats(char* at, Floats x) {
  if constexpr (T == Type::kFloat16) {
    const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), halves);
  } else {
    _mm256_storeu_ps(reinterpret_cast<float*>(at), x);
  }
}

// 8 words of a row, from its word `first` on.
template <Type T>
ULYSSES_INLINE Words load_words(const char* row, int64_t first, int64_t /*words*/) {
  return _mm256_castps_si256(load_floats<T>(row + first * kBytes<T>));
}
template <Type T>
ULYSSES_INLINE void store_words(char* row, int64_t first, int64_t /*words*/, Words x) {
  store_floats<T>(row + first * kBytes<T>, _mm256_castsi256_ps(x));
}

template <Type T>
ULYSSES_INLINE Words to_words(Floats low, Floats /*high*/) {
  return _mm256_castps_si256(low);
}
template <Type T>
Words interleaved(const char* low, const char* high);  // of bfloat16, which has no instance for AVX2

template <Type T>
ULYSSES_INLINE Floats multiply_words(Words a, Words b, Floats sum) {
  return multiply_add(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), sum);
}

// Word (i, j) of 8 × 8 to (j, i).
inline void transpose(Words (&r)[kLanes]) {
  Words t[kLanes];
  ULYSSES_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  ULYSSES_UNROLL for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  ULYSSES_UNROLL for (int j = 0; j < 4; ++j) {
    t[j] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
    t[j + 4] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
  }
  ULYSSES_UNROLL for (int j = 0; j < 8; ++j) r[j] = t[j];
}

}  // namespace
}  // namespace ulysses::kernels::flash
