#pragma once

#ifndef ULYSSES_CPU_FLASH_WORDS
#error "include avx512_words.h or avx2_words.h first"
#endif

// Products of register tiles, and 2^x.
namespace ulysses::kernels::flash {
namespace {

ULYSSES_INLINE int64_t to_lanes(int64_t n) { return divide_up(n, kLanes) * kLanes; }

// sum[r][j] += Σ over `words` words w of a[r · a_row + w], the same in every lane, · b[w · b_word + kLanes · j + lane]
template <Type T, int N>
ULYSSES_INLINE void multiply_rows(Floats (&sum)[kRows][N], const Word* a, int64_t a_row, const Word* b, int64_t b_word,
                                  int64_t words) {
  for (int64_t w = 0; w < words; ++w, ++a, b += b_word) {
    Words lanes[N];
    ULYSSES_UNROLL for (int j = 0; j < N; ++j) lanes[j] = load(b + j * kLanes);
    ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
      const Words same = in_all(a[r * a_row]);
      ULYSSES_UNROLL for (int j = 0; j < N; ++j) sum[r][j] = multiply_words<T>(lanes[j], same, sum[r][j]);
    }
  }
}

// The same with `a` packed in tiles of kLanes rows × kLanes words, one row of them behind the other, from word `skip`
// on.
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
  ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) { ULYSSES_UNROLL for (int j = 0; j < N; ++j) sum[r][j] = Floats{}; }
}

// 2^x: a polynomial of x − floor(x), of degree 4 (relative error 3e-6) for bfloat16 or 6 (6e-8). Exactly 0 for −inf.
template <Type T>
ULYSSES_INLINE Floats exp2_of(Floats x) {
  const Floats f = fraction_of(x);
  Floats p;
  if constexpr (T == Type::kBfloat16) {
    p = multiply_add(in_all(1.3534167e-2F), f, in_all(5.2011464e-2F));
    p = multiply_add(p, f, in_all(2.4144275e-1F));
    p = multiply_add(p, f, in_all(6.9300383e-1F));
    p = multiply_add(p, f, in_all(1.0000026F));
  } else {
    p = multiply_add(in_all(2.1702255e-4F), f, in_all(1.2439688e-3F));
    p = multiply_add(p, f, in_all(9.6788410e-3F));
    p = multiply_add(p, f, in_all(5.5483342e-2F));
    p = multiply_add(p, f, in_all(2.4022984e-1F));
    p = multiply_add(p, f, in_all(6.9314698e-1F));
    p = multiply_add(p, f, in_all(1.0F));
  }
  return scaled_by_exp2(p, x);
}

}  // namespace
}  // namespace ulysses::kernels::flash
