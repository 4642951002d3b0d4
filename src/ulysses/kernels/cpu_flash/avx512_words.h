#pragma once

// Registers of 16 lanes, for files that are compiled for AVX-512. avx2_words.h has the same names.
#include <immintrin.h>

#include "ulysses/kernels/cpu_flash/words.h"

#define ULYSSES_CPU_FLASH_WORDS

namespace ulysses::kernels::flash {
namespace {

using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

constexpr int64_t kLanes = 16;
constexpr int kRows = 8;  // rows of a register tile: 8 × 3 accumulators of 32 registers

ULYSSES_INLINE Mask first_lanes(int64_t n) {
  return n >= kLanes ? 0xffff : n <= 0 ? 0 : static_cast<Mask>((1U << n) - 1);
}
ULYSSES_INLINE Mask lanes_from(int64_t first) {
  const Words lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(static_cast<int>(clamped(first, 0, kLanes))));
}
ULYSSES_INLINE Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
ULYSSES_INLINE Mask not_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
ULYSSES_INLINE Mask either(Mask a, Mask b) { return a | b; }
ULYSSES_INLINE bool is_any(Mask mask) { return mask != 0; }
ULYSSES_INLINE Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }

ULYSSES_INLINE Floats in_all(float x) { return _mm512_set1_ps(x); }
ULYSSES_INLINE Words in_all(Word x) { return _mm512_set1_epi32(static_cast<int>(x)); }
ULYSSES_INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
ULYSSES_INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
ULYSSES_INLINE Words load(const Word* from) { return _mm512_loadu_si512(from); }
ULYSSES_INLINE void store(Word* to, Words x) { _mm512_storeu_si512(to, x); }
// The first `count` of 16 lanes, `otherwise` in the rest.
ULYSSES_INLINE Floats load_some(const float* from, int64_t count, float otherwise) {
  return _mm512_mask_loadu_ps(in_all(otherwise), first_lanes(count), from);
}

ULYSSES_INLINE Floats higher(Floats a, Floats b) { return _mm512_max_ps(a, b); }
ULYSSES_INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
ULYSSES_INLINE Floats multiply_subtract(Floats a, Floats b, Floats less) { return _mm512_fmsub_ps(a, b, less); }
ULYSSES_INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }

// x − floor(x), and x · 2^floor(y): exactly 0 for y = −inf.
ULYSSES_INLINE Floats fraction_of(Floats x) { return _mm512_reduce_ps(x, 1); }
ULYSSES_INLINE Floats scaled_by_exp2(Floats x, Floats y) { return _mm512_scalef_ps(x, y); }

// `words` words of a row, from its word `first` on; zero behind them.
template <Type T>
ULYSSES_INLINE Words load_words(const char* row, int64_t first, int64_t words) {
  const Mask mask = first_lanes(words);
  if constexpr (T == Type::kFloat16)
    return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row + first * 2)));
  return _mm512_maskz_loadu_epi32(mask, row + first * 4);
}

template <Type T>
ULYSSES_INLINE void store_words(char* row, int64_t first, int64_t words, Words x) {
  const Mask mask = first_lanes(words);
  if constexpr (T == Type::kFloat16) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_castsi512_ps(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(row + first * 2, mask, halves);
  } else {
    _mm512_mask_storeu_epi32(row + first * 4, mask, x);
  }
}

// 16 elements of a row as floats.
template <Type T>
ULYSSES_INLINE Floats load_floats(const char* at) {
  if constexpr (T == Type::kFloat32) return _mm512_loadu_ps(at);
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  if constexpr (T == Type::kFloat16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <Type T>
ULYSSES_INLINE void store_floats(char* at, Floats x) {
  if constexpr (T == Type::kFloat32) {
    _mm512_storeu_ps(at, x);
  } else if constexpr (T == Type::kFloat16) {
    const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), halves);
  } else {
#ifdef __AVX512BF16__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(x));
#endif
  }
}

// Lane i → the word of (low[i], high[i]); float32: low.
template <Type T>
ULYSSES_INLINE Words to_words(Floats low, Floats high) {
#ifdef __AVX512BF16__
  if constexpr (T == Type::kBfloat16) {
    const Words pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(pairs, (Words)_mm512_cvtne2ps_pbh(high, low));
  }
#endif
  (void)high;
  return _mm512_castps_si512(low);
}

// Lane i → the word of elements i of two rows of bfloat16; a null `high` counts as zeros.
template <Type T>
ULYSSES_INLINE Words interleaved(const char* low, const char* high) {
  const auto half = [](const char* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  return high == nullptr ? half(low) : _mm512_or_si512(half(low), _mm512_slli_epi32(half(high), 16));
}

// Sums of products, of pairs for bfloat16.
template <Type T>
ULYSSES_INLINE Floats multiply_words(Words a, Words b, Floats sum) {
#ifdef __AVX512BF16__
  if constexpr (T == Type::kBfloat16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

// Word (i, j) of 16 × 16 to (j, i).
inline void transpose(Words (&r)[kLanes]) {
  Words t[kLanes];
  ULYSSES_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  ULYSSES_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  ULYSSES_UNROLL for (int i = 0; i < 16; i += 8) {
    ULYSSES_UNROLL for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  }
  ULYSSES_UNROLL for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

}  // namespace
}  // namespace ulysses::kernels::flash
