#pragma once

#include "ulysses/kernels/cpu_flash/products.h"

// The layouts that the products read, packed once from tensors of any strides.
namespace ulysses::kernels::flash {
namespace {

constexpr int64_t kPieceKeys = 256;  // keys of one packing task: whole tiles, but for the last one

// Queries are cut into tiles of three registers; the last ones have two or one, two of two before a single one is left.
constexpr int64_t kMostRegisters = 3;
constexpr int64_t kMostQueries = kMostRegisters * kLanes;
struct QueryTile {
  int64_t begin, end;
  int64_t registers;
};

ULYSSES_INLINE int64_t num_query_tiles(int64_t q_len) { return divide_up(q_len, kMostQueries); }

ULYSSES_INLINE QueryTile query_tile(int64_t q_len, int64_t tile) {
  const int64_t registers = divide_up(q_len, kLanes), tiles = num_query_tiles(q_len);
  int64_t first = tile * kMostRegisters, count = lesser(kMostRegisters, registers - first);
  if (registers % kMostRegisters == 1 && tiles > 1 && tile >= tiles - 2)
    first = tile == tiles - 1 ? registers - 2 : registers - 4, count = 2;
  return {first * kLanes, lesser((first + count) * kLanes, q_len), count};
}

// The number of registers as a constant: run(Registers<N>()).
template <int N>
struct Registers {
  static constexpr int kCount = N;
};
ULYSSES_INLINE void with_registers(int64_t count, const auto& run) {
  if (count == 3) run(Registers<3>());
  if (count == 2) run(Registers<2>());
  if (count == 1) run(Registers<1>());
}

// Tokens [begin, end) of a head.
struct HeadRows {
  int64_t batch, head, begin, end;
};

// The `i`-th of n tasks in an order in which light and heavy ones alternate: under a causal mask late tiles see more
// keys, and threads get neighbouring tasks.
ULYSSES_INLINE int64_t balanced(int64_t i, int64_t n) { return i % 2 == 0 ? i / 2 : n - 1 - i / 2; }

// Of the whole batch.
ULYSSES_INLINE int64_t kv_head_of(const Shape& shape, const HeadRows& queries) {
  return queries.batch * shape.kv_heads + queries.head / (shape.heads / shape.kv_heads);
}

// One past the last key that a query of [begin, end) sees, and up to where all of them see every key.
struct SeenKeys {
  int64_t end, by_all;
};
ULYSSES_INLINE SeenKeys seen_keys(const Shape& shape, int64_t q_begin, int64_t q_end) {
  if (!shape.is_causal) return {shape.kv_len, shape.kv_len};
  const int64_t end = clamped(q_end + shape.causal_offset, 0, shape.kv_len);
  return {end, clamped(q_begin + shape.causal_offset + 1, 0, end)};
}

template <Type T>
ULYSSES_INLINE int64_t row_tile_words(const Shape& shape) {  // kLanes keys
  return kLanes * to_lanes(words_of<T>(shape.head_dim));
}
template <Type T>
ULYSSES_INLINE int64_t packed_row_words(const Shape& shape) {  // a KV head
  return to_lanes(shape.kv_len) / kLanes * row_tile_words<T>(shape);
}
template <Type T>
ULYSSES_INLINE int64_t key_words(const Shape& shape) {  // a row of packed columns
  return to_lanes(words_of<T>(shape.kv_len));
}

// One packing task: keys of a KV head, which is the kv_head-th of the whole batch.
struct KeyPiece {
  int64_t kv_head;
  HeadRows keys;
};
ULYSSES_INLINE int64_t num_key_pieces(const Shape& shape) {
  return shape.batch * shape.kv_heads * divide_up(shape.kv_len, kPieceKeys);
}
ULYSSES_INLINE KeyPiece key_piece(const Shape& shape, int64_t task) {
  const int64_t pieces = divide_up(shape.kv_len, kPieceKeys);
  const int64_t kv_head = task / pieces, first = task % pieces * kPieceKeys;
  const int64_t last = lesser(first + kPieceKeys, shape.kv_len);
  return {kv_head, {kv_head / shape.kv_heads, kv_head % shape.kv_heads, first, last}};
}

// kLanes words of a row of x, from word w of `words` on; zero behind the words, and for rows from at.end on.
template <Type T>
ULYSSES_INLINE Words row_words(const Rows& x, const HeadRows& at, int64_t row, int64_t w, int64_t words) {
  return row < at.end ? load_words<T>(row_of<T>(x, at.batch, at.head, row), w, words - w) : Words{};
}

// Keys of a head → out[key / L][word / L][L keys][L words] with L = kLanes, zero behind the last key.
template <Type T>
void pack_key_rows(Word* out, const Shape& shape, const Rows& x, const HeadRows& at) {
  const int64_t words = words_of<T>(shape.head_dim);
  for (int64_t s = at.begin; s < at.end; s += kLanes) {
    for (int64_t w = 0; w < words; w += kLanes) {
      Word* tile = out + s / kLanes * row_tile_words<T>(shape) + w * kLanes;
      for (int64_t i = 0; i < kLanes; ++i) store(tile + i * kLanes, row_words<T>(x, at, s + i, w, words));
    }
  }
}

// The word (row, row + 1) of kLanes columns from d on; float32: row. Rows from at.end on are zero.
template <Type T>
ULYSSES_INLINE Words row_pair(const Rows& x, const HeadRows& at, int64_t row, int64_t d) {
  if constexpr (T == Type::kBfloat16) {
    const auto columns = [&](int64_t of) { return row_of<T>(x, at.batch, at.head, of) + d * kBytes<T>; };
    if (row >= at.end) return Words{};
    return interleaved<T>(columns(row), row + 1 < at.end ? columns(row + 1) : nullptr);
  } else {
    return row_words<T>(x, at, row, d, d + kLanes);
  }
}

// Keys of a head → out[d / L][key word / L][L columns][L key words] with L = kLanes, zero behind the last key.
template <Type T>
void pack_key_columns(Word* out, const Shape& shape, const Rows& x, const HeadRows& at) {
  const int64_t words = key_words<T>(shape);
  for (int64_t w = at.begin / kPerWord<T>; w < to_lanes(words_of<T>(at.end)); w += kLanes) {
    for (int64_t d = 0; d < shape.head_dim; d += kLanes) {
      Words r[kLanes];
      for (int i = 0; i < kLanes; ++i) r[i] = row_pair<T>(x, at, (w + i) * kPerWord<T>, d);
      transpose(r);
      for (int i = 0; i < kLanes; ++i) store(out + d * words + (w + i) * kLanes, r[i]);
    }
  }
}

// Queries of a head, at most kLanes · N → out[word][kLanes · N lanes], zero in the lanes behind.
template <Type T, int N>
void pack_query_lanes(Word* out, const Shape& shape, const Rows& x, const HeadRows& at) {
  const int64_t words = words_of<T>(shape.head_dim);
  for (int j = 0; j < N; ++j) {
    for (int64_t w = 0; w < words; w += kLanes) {
      Words r[kLanes];
      for (int i = 0; i < kLanes; ++i) r[i] = row_words<T>(x, at, at.begin + j * kLanes + i, w, words);
      transpose(r);
      for (int i = 0; i < kLanes && w + i < words; ++i) store(out + (w + i) * N * kLanes + j * kLanes, r[i]);
    }
  }
}

// The way back: sums[d][kLanes · N lanes] → rows of x, times `factor` of each lane.
template <Type T, int N>
void store_query_lanes(const float* sums, const Shape& shape, const MutableRows& x, const HeadRows& at,
                       const Floats (&factor)[N]) {
  constexpr int kPair = kPerWord<T>;
  const int64_t words = words_of<T>(shape.head_dim);
  for (int j = 0; j < N; ++j) {
    for (int64_t w = 0; w < words; w += kLanes) {
      Words r[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const float* from = sums + (w + i) * kPair * N * kLanes + j * kLanes;
        const auto scaled = [&](int64_t row) { return factor[j] * load(from + row * N * kLanes); };
        r[i] = w + i < words ? to_words<T>(scaled(0), scaled(kPair - 1)) : Words{};
      }
      transpose(r);
      for (int64_t i = 0; i < kLanes && at.begin + j * kLanes + i < at.end; ++i)
        store_words<T>(row_of<T>(x, at.batch, at.head, at.begin + j * kLanes + i), w, words - w, r[i]);
    }
  }
}

// −inf into the scores of keys [key, key + kRows) that a lane does not see. Lanes are the queries from q_begin on.
template <int N>
ULYSSES_INLINE void hide_keys(Floats (&scores)[kRows][N], const Shape& shape, int64_t key, int64_t key_end,
                              int64_t q_begin) {
  ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
    ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
      const int64_t first = shape.is_causal ? key + r - shape.causal_offset - q_begin - j * kLanes : 0;
      const Mask sees = key + r < key_end ? lanes_from(first) : Mask{};
      scores[r][j] = select(sees, scores[r][j], in_all(-kInfinity));
    }
  }
}

}  // namespace
}  // namespace ulysses::kernels::flash
