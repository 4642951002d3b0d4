#pragma once

#include "ulysses/kernels/cpu_flash/pack.h"

// The forward of our CPU attention kernel. Scores are held transposed, Sᵀ[key][query], so that the lanes of a
// register are queries: the softmax has no step across lanes, and its pairs (key, key + 1) are what the product with
// V reads.
//
//   Sᵀ [kRows keys × 3 · kLanes queries] = K rows · Q lanes    K packed in rows, Q per tile, by word
//   Pᵀ = 2^((Sᵀ − m) · c)                                      m, the reference of a query: moved lazily
//   Oᵀ [d][queries] += Vᵀ columns · Pᵀ                         once per 256 keys (float32: 128)
//
// Note [Lazy reference]: a query's reference moves only when one of its scores passes it by 2^8, so the running output
// is hardly ever rescaled. A lane moves alone and sums keep their order, so that a row's bits depend on its own query
// and the keys, not on which queries or heads are computed beside it. Sums before the division hold up to 2^8 · Σ |v|,
// which must stay below float32's largest number. Source: FlashAttention-2 (arXiv 2307.08691) §3.1;
// deviation: the lazy reference, and the transposed scores.
namespace ulysses::kernels::flash {
namespace {

// Keys whose weights are held, and over which a chain of additions runs before it is added to the output: float32
// errors grow with it.
template <Type T>
constexpr int64_t kBlockKeys = T == Type::kBfloat16 ? 256 : 128;
constexpr float kSlack = 8.0F;  // log2 of how far a score may pass the reference
constexpr float kLowest = -3.40282347e38F;

template <Type T>
int64_t forward_scratch_words(const Shape& shape) {
  return kMostQueries * (words_of<T>(shape.head_dim) + kBlockKeys<T> / kPerWord<T> + 2 * shape.head_dim);
}

// One tile of kLanes · N queries of one head.
template <Type T, int N>
struct ForwardTile {
  static constexpr int64_t kWidth = N * kLanes;
  static constexpr int kPair = kPerWord<T>;

  const Shape& shape;
  const Word *keys, *values;  // packed, of the KV head
  Word *queries, *weights;
  float *sums, *part;  // [d][lane]; `part` is the sum over a block that a move of the reference interrupts
  HeadRows query_rows;
  SeenKeys seen;
  float factor;  // scale · log2 e
  Floats reference[N], limit[N], total[N], block_total[N];

  ULYSSES_INLINE void start() {
    memset(sums, 0, sizeof(float) * static_cast<size_t>(shape.head_dim * kWidth));
    for (int j = 0; j < N; ++j) {
      reference[j] = limit[j] = in_all(kLowest);
      total[j] = Floats{};
    }
  }

  // Oᵀ += Vᵀ Pᵀ over the words [from, to) of the block at key word `block`, into `part` unless the block ends there.
  ULYSSES_INLINE void add_values(int64_t block, int64_t from, int64_t to, bool ends) {
    const int64_t row = key_words<T>(shape), first = block + from;
    for (int64_t d = 0; d < shape.head_dim; d += kRows) {
      float *whole = sums + d * kWidth, *held = part + d * kWidth;
      Floats sum[kRows][N];
      ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
        ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
          sum[r][j] = from > 0 ? load(held + r * kWidth + j * kLanes) : Floats{};
        }
      }
      const Word* columns = values + d / kLanes * kLanes * row + first / kLanes * kLanes * kLanes + d % kLanes * kLanes;
      multiply_tiles<T, N>(sum, columns, first % kLanes, weights + from * kWidth, kWidth, to - from);
      ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
        ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
          const int64_t at = r * kWidth + j * kLanes;
          if (ends) sum[r][j] = sum[r][j] + load(whole + at);
          store((ends ? whole : held) + at, sum[r][j]);
        }
      }
    }
  }

  // The lanes whose highest score passed the limit get it as their reference, and their sums so far are scaled to it.
  __attribute__((noinline)) void move_references(const Floats (&highest)[N], const Mask (&passed)[N], bool has_part) {
    for (int j = 0; j < N; ++j) {
      const Floats to = select(passed[j], highest[j], reference[j]);
      const Floats down = exp2_of<Type::kFloat32>((reference[j] - to) * in_all(factor));
      const Floats by = select(passed[j], down, in_all(1.0F));
      reference[j] = to;
      limit[j] = select(passed[j], to + in_all(kSlack / factor), limit[j]);
      total[j] = total[j] * by;
      block_total[j] = block_total[j] * by;
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        float *whole = sums + d * kWidth + j * kLanes, *held = part + d * kWidth + j * kLanes;
        store(whole, by * load(whole));
        if (has_part) store(held, by * load(held));
      }
    }
  }

  // Whether a score of a lane passes its limit; the highest of each lane besides.
  ULYSSES_INLINE bool passes_limit(const Floats (&scores)[kRows][N], Floats (&highest)[N], Mask (&passed)[N]) {
    Mask any{};
    ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
      highest[j] = scores[0][j];
      ULYSSES_UNROLL for (int r = 1; r < kRows; ++r) highest[j] = higher(highest[j], scores[r][j]);
      passed[j] = greater(highest[j], limit[j]);
      any = either(any, passed[j]);
    }
    return is_any(any);
  }

  // Scores → weights in `to`, by key word. (s − m) · c, not s · c − m · c: that overflows for huge scores.
  ULYSSES_INLINE void weigh(Floats (&scores)[kRows][N], Word* to) {
    ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
      ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
        scores[r][j] = exp2_of<T>((scores[r][j] - reference[j]) * in_all(factor));
        block_total[j] = block_total[j] + scores[r][j];
      }
      ULYSSES_UNROLL for (int r = 0; r < kRows; r += kPair) {
        store(to + r / kPair * kWidth + j * kLanes, to_words<T>(scores[r][j], scores[r + kPair - 1][j]));
      }
    }
  }

  ULYSSES_INLINE void attend_block(int64_t block) {
    const int64_t block_end = lesser(block + kBlockKeys<T>, seen.end);
    const int64_t words = words_of<T>(shape.head_dim);
    int64_t done = 0;  // key words of the block that are in `part`
    for (int j = 0; j < N; ++j) block_total[j] = Floats{};
    for (int64_t key = block; key < block_end; key += kRows) {
      Floats scores[kRows][N], highest[N];
      Mask passed[N];
      clear(scores);
      const Word* rows = keys + key / kLanes * row_tile_words<T>(shape) + key % kLanes * kLanes;
      multiply_tiles<T, N>(scores, rows, 0, queries, kWidth, words);
      if (key + kRows > seen.by_all) hide_keys<N>(scores, shape, key, seen.end, query_rows.begin);
      if (__builtin_expect(passes_limit(scores, highest, passed), 0)) {
        const int64_t now = (key - block) / kPair;
        if (now > done) add_values(block / kPair, done, now, false);
        done = now;
        move_references(highest, passed, done > 0);
      }
      weigh(scores, weights + (key - block) / kPair * kWidth);
    }
    add_values(block / kPair, done, divide_up(block_end - block, kRows) * kRows / kPair, true);
    for (int j = 0; j < N; ++j) total[j] = total[j] + block_total[j];
  }

  // out = O / l, and lse = m · scale + ln l. Rows without keys: 0 and −inf.
  ULYSSES_INLINE void finish(const MutableRows& out, float* all_lse) {
    float* lse = all_lse + (query_rows.batch * shape.heads + query_rows.head) * shape.q_len + query_rows.begin;
    Floats inverse[N];
    for (int j = 0; j < N; ++j) {
      alignas(64) float references[kLanes], totals[kLanes];
      store(references, reference[j]);
      store(totals, total[j]);
      for (int64_t i = 0; i < kLanes && query_rows.begin + j * kLanes + i < query_rows.end; ++i) {
        const float top = references[i] * static_cast<float>(shape.scale);
        lse[j * kLanes + i] = totals[i] == 0 ? -kInfinity : top + logf(totals[i]);
      }
      inverse[j] = select(not_equal(total[j], Floats{}), in_all(1.0F) / total[j], Floats{});
    }
    store_query_lanes<T, N>(sums, shape, out, query_rows, inverse);
  }
};

template <Type T, int N>
void attend_tile(const ForwardCall& call, Word* scratch, const HeadRows& queries) {
  const Shape& shape = call.shape;
  const int64_t kv_head = kv_head_of(shape, queries);
  ForwardTile<T, N> tile{shape};
  tile.keys = call.packed_k + kv_head * packed_row_words<T>(shape);
  tile.values = call.packed_v + kv_head * key_words<T>(shape) * shape.head_dim;
  tile.queries = scratch;
  tile.weights = tile.queries + words_of<T>(shape.head_dim) * tile.kWidth;
  tile.sums = reinterpret_cast<float*>(tile.weights + kBlockKeys<T> / tile.kPair * tile.kWidth);
  tile.part = tile.sums + shape.head_dim * tile.kWidth;
  tile.query_rows = queries;
  tile.seen = seen_keys(shape, queries.begin, queries.end);
  tile.factor = static_cast<float>(shape.scale) * kLog2e;
  tile.start();
  pack_query_lanes<T, N>(tile.queries, shape, call.q, queries);
  for (int64_t block = 0; block < tile.seen.end; block += kBlockKeys<T>) tile.attend_block(block);
  tile.finish(call.out, call.lse);
}

template <Type T>
ForwardSizes forward_sizes(const Shape& shape) {
  const int64_t kv_heads = shape.batch * shape.kv_heads;
  return {kv_heads * packed_row_words<T>(shape), kv_heads * key_words<T>(shape) * shape.head_dim,
          forward_scratch_words<T>(shape), num_key_pieces(shape),
          shape.batch * shape.heads * num_query_tiles(shape.q_len)};
}

template <Type T>
void pack(const ForwardCall& call, int64_t begin, int64_t end) {
  const Shape& shape = call.shape;
  for (int64_t task = begin; task < end; ++task) {
    const auto [kv_head, keys] = key_piece(shape, task);
    pack_key_rows<T>(call.packed_k + kv_head * packed_row_words<T>(shape), shape, call.k, keys);
    pack_key_columns<T>(call.packed_v + kv_head * key_words<T>(shape) * shape.head_dim, shape, call.v, keys);
  }
}

template <Type T>
void attend(const ForwardCall& call, uint32_t* scratch, int64_t begin, int64_t end) {
  const Shape& shape = call.shape;
  const int64_t tiles = num_query_tiles(shape.q_len);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t head = task / tiles % shape.heads, batch = task / tiles / shape.heads;
    const QueryTile tile = query_tile(shape.q_len, balanced(task % tiles, tiles));
    const HeadRows queries{batch, head, tile.begin, tile.end};
    with_registers(tile.registers, [&](auto n) { attend_tile<T, n.kCount>(call, scratch, queries); });
  }
}

}  // namespace
}  // namespace ulysses::kernels::flash
