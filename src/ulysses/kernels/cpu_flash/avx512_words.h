#pragma once

// Registers of our CPU attention kernel. A word is 4 bytes of the summed dimension: two bfloat16 or one float32.
// Included only by files that are compiled for AVX-512, hence the unnamed namespace and no template of std: a copy of
// either must not be one that the linker may choose for code that runs on every processor.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "ulysses/kernels/cpu_flash/call.h"

#define ULYSSES_UNROLL _Pragma("GCC unroll 16")
#define ULYSSES_INLINE inline __attribute__((always_inline))

namespace ulysses::kernels::flash {
namespace {

enum class Type { kFloat32, kFloat16, kBfloat16 };

using Word = uint32_t;
using Floats = __m512;
using Words = __m512i;

constexpr int64_t kLanes = 16;
constexpr int kRows = 8;  // rows of a register tile: kRows × N accumulators, N ≤ 3
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.44269504F;

template <Type T>
constexpr int kPerWord = T == Type::kBfloat16 ? 2 : 1;
template <Type T>
constexpr int64_t kBytes = T == Type::kFloat32 ? 4 : 2;

ULYSSES_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
ULYSSES_INLINE int64_t clamped(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
ULYSSES_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
ULYSSES_INLINE int64_t to_lanes(int64_t n) { return divide_up(n, kLanes) * kLanes; }
ULYSSES_INLINE __mmask16 first_lanes(int64_t n) {
  return n >= kLanes ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1U << n) - 1);
}

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

// `words` words of a row, from its word `first` on; zero behind them.
template <Type T>
ULYSSES_INLINE Words load_words(const char* row, int64_t first, int64_t words) {
  const __mmask16 mask = first_lanes(words);
  if constexpr (T == Type::kFloat16)
    return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row + first * 2)));
  return _mm512_maskz_loadu_epi32(mask, row + first * 4);
}

template <Type T>
ULYSSES_INLINE void store_words(char* row, int64_t first, int64_t words, Words x) {
  const __mmask16 mask = first_lanes(words);
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

template <Type T>
ULYSSES_INLINE Floats multiply_add(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
  if constexpr (T == Type::kBfloat16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

// sum[r][j] += Σ over `words` words w of a[r · a_row + w], the same in every lane, · b[w · b_word + 16 · j + lane]
template <Type T, int N>
ULYSSES_INLINE void multiply_rows(Floats (&sum)[kRows][N], const Word* a, int64_t a_row, const Word* b, int64_t b_word,
                                  int64_t words) {
  for (int64_t w = 0; w < words; ++w, ++a, b += b_word) {
    Words lanes[N];
    ULYSSES_UNROLL for (int j = 0; j < N; ++j) lanes[j] = _mm512_loadu_si512(b + j * kLanes);
    ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
      const Words same = _mm512_set1_epi32(static_cast<int>(a[r * a_row]));
      ULYSSES_UNROLL for (int j = 0; j < N; ++j) sum[r][j] = multiply_add<T>(sum[r][j], lanes[j], same);
    }
  }
}

// The same with `a` packed in tiles of 16 rows × 16 words, one row of them behind the other, from word `skip` on.
template <Type T, int N>
ULYSSES_INLINE void multiply_tiles(Floats (&sum)[kRows][N], const Word* a, int64_t skip, const Word* b, int64_t b_word,
                                   int64_t words) {
  while (words > 0) {
    const int64_t now = lesser(kLanes - skip, words);
    multiply_rows<T, N>(sum, a + skip, kLanes, b, b_word, now);
    words -= now, b += now * b_word, a += kLanes * kLanes, skip = 0;
  }
}

template <int N>
ULYSSES_INLINE void clear(Floats (&sum)[kRows][N]) {
  ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
    ULYSSES_UNROLL for (int j = 0; j < N; ++j) sum[r][j] = _mm512_setzero_ps();
  }
}

// 2^x: a polynomial of x − floor(x), of degree 4 (relative error 3e-6) for bfloat16 or 6 (6e-8); scalef floors x
// itself, gives 0 far below and exactly 0 for −inf.
template <Type T>
ULYSSES_INLINE Floats exp2_of(Floats x) {
  const Floats f = _mm512_reduce_ps(x, 1);
  Floats p;
  if constexpr (T == Type::kBfloat16) {
    p = _mm512_fmadd_ps(_mm512_set1_ps(1.3534167e-2F), f, _mm512_set1_ps(5.2011464e-2F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4144275e-1F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9300383e-1F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026F));
  } else {
    p = _mm512_fmadd_ps(_mm512_set1_ps(2.1702255e-4F), f, _mm512_set1_ps(1.2439688e-3F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6788410e-3F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5483342e-2F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022984e-1F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314698e-1F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  }
  return _mm512_scalef_ps(p, x);
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
