#pragma once

#include "ulysses/kernels/cpu_flash/products.h"

// The layouts that the products read, packed once from tensors of any strides.
namespace ulysses::kernels::flash {
namespace {

constexpr int64_t kPieceKeys = 256;  // keys of one packing task

// Queries are cut into tiles of three registers; the last ones have two or one, two of two before a single one is left.
struct QueryTile {
  int64_t begin;
  int registers;  // lanes = kLanes · registers
};

ULYSSES_INLINE int64_t num_query_tiles(int64_t q_len) { return divide_up(divide_up(q_len, kLanes), 3); }

ULYSSES_INLINE QueryTile query_tile(int64_t q_len, int64_t tile) {
  const int64_t registers = divide_up(q_len, kLanes), tiles = divide_up(registers, 3);
  if (registers % 3 == 1 && tiles > 1 && tile >= tiles - 2)
    return {(tile == tiles - 1 ? registers - 2 : registers - 4) * kLanes, 2};
  return {tile * 3 * kLanes, static_cast<int>(lesser(3, registers - tile * 3))};
}

// The `i`-th of n tasks in an order in which light and heavy ones alternate: under a causal mask late tiles see more
// keys, and threads get neighbouring tasks.
ULYSSES_INLINE int64_t balanced(int64_t i, int64_t n) { return i % 2 == 0 ? i / 2 : n - 1 - i / 2; }

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

// One packing task: keys [first, last) of a KV head, which is the kv_head-th of the whole batch.
struct KeyPiece {
  int64_t kv_head, batch, head, first, last;
};
ULYSSES_INLINE int64_t num_key_pieces(const Shape& shape) {
  return shape.batch * shape.kv_heads * divide_up(shape.kv_len, kPieceKeys);
}
ULYSSES_INLINE KeyPiece key_piece(const Shape& shape, int64_t task) {
  const int64_t pieces = divide_up(shape.kv_len, kPieceKeys);
  const int64_t kv_head = task / pieces, first = task % pieces * kPieceKeys;
  return {kv_head, kv_head / shape.kv_heads, kv_head % shape.kv_heads, first, lesser(first + kPieceKeys, shape.kv_len)};
}

// Keys [begin, end) of a head → out[key / L][word / L][L keys][L words] with L = kLanes, zero behind the last key.
template <Type T>
void pack_key_rows(Word* out, const Shape& shape, const Rows& x, int64_t batch, int64_t head, int64_t begin,
                   int64_t end) {
  const int64_t words = words_of<T>(shape.head_dim);
  for (int64_t s = begin; s < end; s += kLanes) {
    for (int64_t w = 0; w < words; w += kLanes) {
      Word* tile = out + s / kLanes * row_tile_words<T>(shape) + w * kLanes;
      for (int64_t i = 0; i < kLanes; ++i) {
        const bool is_key = s + i < shape.kv_len;
        const Words row = is_key ? load_words<T>(row_of<T>(x, batch, head, s + i), w, words - w) : Words{};
        store(tile + i * kLanes, row);
      }
    }
  }
}

// The word (row, row + 1) of kLanes columns from d on; float32: row. Rows from `end` on are zero.
template <Type T>
ULYSSES_INLINE Words row_pair(const Rows& x, int64_t batch, int64_t head, int64_t row, int64_t end, int64_t d) {
  if (row >= end) return Words{};
  const char* low = row_of<T>(x, batch, head, row);
  if constexpr (T == Type::kBfloat16) {
    const char* high = row + 1 < end ? row_of<T>(x, batch, head, row + 1) + d * kBytes<T> : nullptr;
    return interleaved<T>(low + d * kBytes<T>, high);
  } else {
    return load_words<T>(low, d, kLanes);
  }
}

// Keys [begin, end) of a head → out[d / L][key word / L][L columns][L key words] with L = kLanes.
template <Type T>
void pack_key_columns(Word* out, const Shape& shape, const Rows& x, int64_t batch, int64_t head, int64_t begin,
                      int64_t end) {
  const int64_t words = key_words<T>(shape);
  for (int64_t w = begin / kPerWord<T>; w < to_lanes(words_of<T>(end)); w += kLanes) {
    for (int64_t d = 0; d < shape.head_dim; d += kLanes) {
      Words r[kLanes];
      for (int i = 0; i < kLanes; ++i) r[i] = row_pair<T>(x, batch, head, (w + i) * kPerWord<T>, shape.kv_len, d);
      transpose(r);
      for (int i = 0; i < kLanes; ++i) store(out + d * words + (w + i) * kLanes, r[i]);
    }
  }
}

// Queries [begin, end) of a head, at most kLanes · N → out[word][kLanes · N lanes], zero in the lanes behind.
template <Type T, int N>
void pack_query_lanes(Word* out, const Shape& shape, const Rows& x, int64_t batch, int64_t head, int64_t begin,
                      int64_t end) {
  const int64_t words = words_of<T>(shape.head_dim);
  for (int j = 0; j < N; ++j) {
    for (int64_t w = 0; w < words; w += kLanes) {
      Words r[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = begin + j * kLanes + i;
        r[i] = row < end ? load_words<T>(row_of<T>(x, batch, head, row), w, words - w) : Words{};
      }
      transpose(r);
      for (int i = 0; i < kLanes && w + i < words; ++i) store(out + (w + i) * N * kLanes + j * kLanes, r[i]);
    }
  }
}

// The way back: sums[d][kLanes · N lanes] → rows [begin, end) of x, times `factor` of each lane.
template <Type T, int N>
void store_query_lanes(const float* sums, const Shape& shape, const MutableRows& x, int64_t batch, int64_t head,
                       int64_t begin, int64_t end, const Floats (&factor)[N]) {
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
      for (int64_t i = 0; i < kLanes && begin + j * kLanes + i < end; ++i)
        store_words<T>(row_of<T>(x, batch, head, begin + j * kLanes + i), w, words - w, r[i]);
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
