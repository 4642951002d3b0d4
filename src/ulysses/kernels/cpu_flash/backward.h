#pragma once

#include "ulysses/kernels/cpu_flash/pack.h"

// The backward of our CPU attention kernel: five products a tile, on the same transposed scores as the forward.
//
//   Sᵀ = K rows · Q lanes,  Pᵀ = 2^((Sᵀ · scale − lse) · log2 e)
//   dPᵀ = V rows · dO lanes,  dSᵀ = Pᵀ ∘ (dPᵀ − row_dot)
//   dQᵀ [d][queries] += Kᵀ columns · dSᵀ     dV [keys][d] += Pᵀ rows · dO pairs     dK [keys][d] += dSᵀ rows · Q pairs
//
// A task owns a range of keys: it sums dK and dV over all queries and all heads of the group, and writes dQ's part of
// these keys. finish_dq() adds the parts in the order of the keys. No sum depends on threads.
// Source: FlashAttention-2 (arXiv 2307.08691) §3.1.2; deviation: dQ from parts and not by atomic additions.
namespace ulysses::kernels::flash {
namespace {

constexpr int64_t kOwnedKeys = 512;   // keys whose dK and dV are summed in scratch
constexpr int64_t kMostKeyParts = 4;  // parts of dq_sums, by key: memory against tasks of a KV head
constexpr int64_t kPartKeys = 128;    // a part holds a multiple of these
constexpr int64_t kGradKeys = 128;    // keys whose weights are held

// What the products read: widened, float16 is float32.
template <Type T>
constexpr Type kHeld = T == Type::kBfloat16 ? Type::kBfloat16 : Type::kFloat32;

struct KeyParts {
  int64_t count, keys;  // keys of one part
};
ULYSSES_INLINE KeyParts key_parts(const Shape& shape) {
  const int64_t keys = divide_up(divide_up(shape.kv_len, kMostKeyParts), kPartKeys) * kPartKeys;
  return {divide_up(shape.kv_len, keys), keys};
}

// dQᵀ of one part and one head; a tile starts at [begin · head_dim].
ULYSSES_INLINE float* dq_part(const BackwardCall& call, int64_t part, int64_t batch, int64_t head) {
  const Shape& shape = call.shape;
  const int64_t heads = shape.batch * shape.heads, size = to_lanes(shape.q_len) * shape.head_dim;
  return call.dq_sums + (part * heads + batch * shape.heads + head) * size;
}

// Buffers of one thread, for tiles of up to kMostQueries.
template <Type T>
struct GradScratch {
  Word *q_lanes, *grad_lanes, *q_pairs, *grad_pairs;  // [word][lane], [word][lane], [query word][d], [query word][d]
  Word *weight_rows, *score_rows, *scores;            // [key][query word], [key][query word], [key word][lane]
  float *dk, *dv;                                     // [key][d] of the owned keys

  static constexpr int64_t kBlock = kGradKeys * kMostQueries / kPerWord<T>;
  static int64_t tile_words(const Shape& shape) { return kMostQueries / kPerWord<T> * shape.head_dim; }
  static int64_t words(const Shape& shape) {
    return 4 * tile_words(shape) + 3 * kBlock + 2 * kOwnedKeys * shape.head_dim;
  }
  ULYSSES_INLINE GradScratch(const Shape& shape, Word* at) {
    const int64_t tile = tile_words(shape);
    q_lanes = at, grad_lanes = q_lanes + tile, q_pairs = grad_lanes + tile, grad_pairs = q_pairs + tile;
    weight_rows = grad_pairs + tile, score_rows = weight_rows + kBlock, scores = score_rows + kBlock;
    dk = reinterpret_cast<float*>(scores + kBlock);
    dv = dk + kOwnedKeys * shape.head_dim;
  }
};

template <Type T, int N>
struct BackwardTile {
  static constexpr int64_t kWidth = N * kLanes;
  static constexpr int kPair = kPerWord<T>;
  static constexpr int64_t kRowWords = kWidth / kPair;  // of weight_rows and score_rows

  const Shape& shape;
  const GradScratch<T>& scratch;
  const Word *k_rows, *v_rows, *k_columns;  // packed, of the KV head
  float* dq;                                // [d][lane]
  HeadRows queries;
  SeenKeys seen;
  float scale;
  Floats lse[N], dot[N];

  // The queries by word (Q or dO) → pairs of queries by column.
  ULYSSES_INLINE void pack_pairs(Word* out, const Rows& x) {
    for (int64_t w = 0; w < kRowWords; ++w) {
      for (int64_t d = 0; d < shape.head_dim; d += kLanes)
        store(out + w * shape.head_dim + d, row_pair<T>(x, queries, queries.begin + w * kPair, d));
    }
  }

  ULYSSES_INLINE void load_queries(const BackwardCall& call) {
    pack_query_lanes<T, N>(scratch.q_lanes, shape, call.q, queries);
    pack_query_lanes<T, N>(scratch.grad_lanes, shape, call.grad_out, queries);
    pack_pairs(scratch.q_pairs, call.q);
    pack_pairs(scratch.grad_pairs, call.grad_out);
    const int64_t row = (queries.batch * shape.heads + queries.head) * shape.q_len + queries.begin;
    for (int j = 0; j < N; ++j) {
      const int64_t count = queries.end - queries.begin - j * kLanes;
      lse[j] = load_some(call.lse + row + j * kLanes, count, kInfinity);
      dot[j] = load_some(call.row_dot + row + j * kLanes, count, 0.0F);
    }
  }

  // Zeros in the lanes behind the last query: a product of theirs is 0 · inf where a key or value is infinite.
  ULYSSES_INLINE void clear_padding(Floats (&x)[kRows][N]) {
    const int64_t count = queries.end - queries.begin;
    if (count == kWidth) return;
    ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
      ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
        x[r][j] = select(first_lanes(count - j * kLanes), x[r][j], Floats{});
      }
    }
  }

  // → rows[key][query word]
  ULYSSES_INLINE void store_rows(Word* rows, const Floats (&x)[kRows][N]) {
    ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
      char* row = reinterpret_cast<char*>(rows + r * kRowWords);
      ULYSSES_UNROLL for (int j = 0; j < N; ++j) store_floats<kHeld<T>>(row + j * kLanes * kBytes<kHeld<T>>, x[r][j]);
    }
  }

  // Weights and score gradients of keys [key, key + kRows) into row `at` of the held block.
  ULYSSES_INLINE void weigh(int64_t key, int64_t at) {
    const int64_t words = words_of<T>(shape.head_dim);
    const int64_t tile = key / kLanes * row_tile_words<T>(shape) + key % kLanes * kLanes;
    Floats scores[kRows][N], weights[kRows][N];
    clear(scores);
    multiply_tiles<T, N>(scores, k_rows + tile, 0, scratch.q_lanes, kWidth, words);
    if (key + kRows > seen.by_all) hide_keys<N>(scores, shape, key, seen.end, queries.begin);
    ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
      ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
        const Floats above = multiply_subtract(scores[r][j], in_all(scale), lse[j]);
        weights[r][j] = exp2_of<T>(above * in_all(kLog2e));
      }
    }
    clear_padding(weights);
    store_rows(scratch.weight_rows + at * kRowWords, weights);
    clear(scores);
    multiply_tiles<T, N>(scores, v_rows + tile, 0, scratch.grad_lanes, kWidth, words);
    ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
      ULYSSES_UNROLL for (int j = 0; j < N; ++j) scores[r][j] = weights[r][j] * (scores[r][j] - dot[j]);
    }
    clear_padding(scores);
    store_rows(scratch.score_rows + at * kRowWords, scores);
    ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
      ULYSSES_UNROLL for (int r = 0; r < kRows; r += kPair) {
        Word* to = scratch.scores + (at + r) / kPair * kWidth + j * kLanes;
        store(to, to_words<T>(scores[r][j], scores[r + kPair - 1][j]));
      }
    }
  }

  // dQᵀ += Kᵀ dSᵀ over `keys` held keys from `block` on; `first`: there is nothing to add to.
  ULYSSES_INLINE void add_to_dq(int64_t block, int64_t keys, bool first) {
    const int64_t row = key_words<T>(shape), word = block / kPair;
    for (int64_t d = 0; d < shape.head_dim; d += kRows) {
      Floats sum[kRows][N];
      clear(sum);
      const Word* columns = k_columns + d / kLanes * kLanes * row + word * kLanes + d % kLanes * kLanes;
      multiply_tiles<T, N>(sum, columns, 0, scratch.scores, kWidth, keys / kPair);
      float* to = dq + d * kWidth;
      ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
        ULYSSES_UNROLL for (int j = 0; j < N; ++j) {
          float* at = to + r * kWidth + j * kLanes;
          store(at, first ? sum[r][j] : sum[r][j] + load(at));
        }
      }
    }
  }

  // sums[key][d] += rows[key][query word] · pairs[query word][d], for kLanes · M columns from d on.
  template <int M>
  ULYSSES_INLINE void add_columns(float* sums, const Word* rows, const Word* pairs, int64_t d) {
    Floats sum[kRows][M];
    clear(sum);
    multiply_rows<T, M>(sum, rows, kRowWords, pairs + d, shape.head_dim, kRowWords);
    ULYSSES_UNROLL for (int r = 0; r < kRows; ++r) {
      ULYSSES_UNROLL for (int j = 0; j < M; ++j) {
        float* at = sums + r * shape.head_dim + d + j * kLanes;
        store(at, sum[r][j] + load(at));
      }
    }
  }

  ULYSSES_INLINE void add_to_keys(float* sums, const Word* rows, const Word* pairs, int64_t keys) {
    for (int64_t d = 0; d < shape.head_dim; d += 2 * kLanes) {
      for (int64_t key = 0; key < keys; key += kRows) {
        float* to = sums + key * shape.head_dim;
        if (d + kLanes < shape.head_dim) {
          add_columns<2>(to, rows + key * kRowWords, pairs, d);
        } else {
          add_columns<1>(to, rows + key * kRowWords, pairs, d);
        }
      }
    }
  }

  // Keys [from, to) that this task owns; the part of dQ begins where `is_first`.
  void run(int64_t from, int64_t to, bool is_first) {
    const int64_t last = lesser(to, seen.end);
    for (int64_t block = from; block < last; block += kGradKeys) {
      const int64_t keys = divide_up(lesser(block + kGradKeys, last) - block, kRows) * kRows;
      for (int64_t key = 0; key < keys; key += kRows) weigh(block + key, key);
      add_to_dq(block, keys, is_first && block == from);
      const int64_t own = (block - from) * shape.head_dim;
      add_to_keys(scratch.dv + own, scratch.weight_rows, scratch.grad_pairs, keys);
      add_to_keys(scratch.dk + own, scratch.score_rows, scratch.q_pairs, keys);
    }
  }
};

// Keys [begin, end) whose gradients a task sums, within part `part` of dq_sums.
struct OwnedKeys {
  int64_t begin, end, part;
};

template <Type T, int N>
void differentiate_tile(const BackwardCall& call, const GradScratch<T>& scratch, const HeadRows& queries,
                        const OwnedKeys& own) {
  const Shape& shape = call.shape;
  const int64_t kv_head = kv_head_of(shape, queries);
  const SeenKeys seen = seen_keys(shape, queries.begin, queries.end);
  if (seen.end <= own.begin) return;
  BackwardTile<T, N> tile{shape, scratch};
  tile.k_rows = call.packed_k + kv_head * packed_row_words<T>(shape);
  tile.v_rows = call.packed_v + kv_head * packed_row_words<T>(shape);
  tile.k_columns = call.packed_k_columns + kv_head * key_words<T>(shape) * shape.head_dim;
  tile.dq = dq_part(call, own.part, queries.batch, queries.head) + queries.begin * shape.head_dim;
  tile.queries = queries, tile.seen = seen, tile.scale = static_cast<float>(shape.scale);
  tile.load_queries(call);
  tile.run(own.begin, own.end, own.begin % key_parts(shape).keys == 0);
}

// sums[key][d] · factor → rows of x.
template <Type T>
void store_key_grads(const float* sums, float factor, const Shape& shape, const MutableRows& x, const HeadRows& at) {
  for (int64_t key = at.begin; key < at.end; ++key, sums += shape.head_dim) {
    for (int64_t d = 0; d < shape.head_dim; d += kLanes) {
      const Floats scaled = in_all(factor) * load(sums + d);
      store_floats<T>(row_of<T>(x, at.batch, at.head, key) + d * kBytes<T>, scaled);
    }
  }
}

// All that a range of owned keys gets from the queries of its group.
template <Type T>
void differentiate_keys(const BackwardCall& call, const GradScratch<T>& scratch, int64_t batch, int64_t kv_head,
                        const OwnedKeys& own) {
  const Shape& shape = call.shape;
  const int64_t group = shape.heads / shape.kv_heads, tiles = num_query_tiles(shape.q_len);
  memset(scratch.dk, 0, sizeof(float) * static_cast<size_t>(2 * kOwnedKeys * shape.head_dim));
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t i = 0; i < tiles; ++i) {
      const QueryTile tile = query_tile(shape.q_len, i);
      const HeadRows queries{batch, head, tile.begin, tile.end};
      with_registers(tile.registers, [&](auto n) { differentiate_tile<T, n.kCount>(call, scratch, queries, own); });
    }
  }
  const HeadRows keys{batch, kv_head, own.begin, own.end};
  store_key_grads<T>(scratch.dk, static_cast<float>(shape.scale), shape, call.dk, keys);
  store_key_grads<T>(scratch.dv, 1.0F, shape, call.dv, keys);
}

template <Type T>
BackwardSizes backward_sizes(const Shape& shape) {
  const int64_t kv_heads = shape.batch * shape.kv_heads, heads = shape.batch * shape.heads;
  const int64_t parts = key_parts(shape).count;
  return {kv_heads * packed_row_words<T>(shape),
          kv_heads * packed_row_words<T>(shape),
          kv_heads * key_words<T>(shape) * shape.head_dim,
          parts * heads * to_lanes(shape.q_len) * shape.head_dim,
          GradScratch<T>::words(shape),
          num_key_pieces(shape),
          heads * shape.q_len,
          kv_heads * parts,
          heads * num_query_tiles(shape.q_len)};
}

template <Type T>
void pack_backward(const BackwardCall& call, int64_t begin, int64_t end) {
  const Shape& shape = call.shape;
  for (int64_t task = begin; task < end; ++task) {
    const auto [kv_head, keys] = key_piece(shape, task);
    const int64_t rows = kv_head * packed_row_words<T>(shape);
    pack_key_rows<T>(call.packed_k + rows, shape, call.k, keys);
    pack_key_rows<T>(call.packed_v + rows, shape, call.v, keys);
    pack_key_columns<T>(call.packed_k_columns + kv_head * key_words<T>(shape) * shape.head_dim, shape, call.k, keys);
  }
}

template <Type T>
void dot_rows(const BackwardCall& call, int64_t begin, int64_t end) {
  const Shape& shape = call.shape;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row % shape.q_len, head = row / shape.q_len % shape.heads;
    const int64_t batch = row / shape.q_len / shape.heads;
    const char* out = row_of<T>(call.out, batch, head, token);
    const char* grad = row_of<T>(call.grad_out, batch, head, token);
    Floats sum{};
    for (int64_t d = 0; d < shape.head_dim; d += kLanes)
      sum = multiply_add(load_floats<T>(out + d * kBytes<T>), load_floats<T>(grad + d * kBytes<T>), sum);
    const float of_lse = call.grad_lse == nullptr ? 0.0F : call.grad_lse[row];
    call.row_dot[row] = sum_of(sum) - of_lse;
  }
}

template <Type T>
void attend_backward(const BackwardCall& call, uint32_t* scratch, int64_t begin, int64_t end) {
  const Shape& shape = call.shape;
  const KeyParts parts = key_parts(shape);
  const GradScratch<T> buffers(shape, scratch);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t kv_head = task / parts.count, part = balanced(task % parts.count, parts.count);
    const int64_t last = lesser((part + 1) * parts.keys, shape.kv_len);
    for (int64_t key = part * parts.keys; key < last; key += kOwnedKeys)
      differentiate_keys<T>(call, buffers, kv_head / shape.kv_heads, kv_head % shape.kv_heads,
                            {key, lesser(key + kOwnedKeys, last), part});
  }
}

template <Type T, int N>
void finish_tile(const BackwardCall& call, const HeadRows& queries) {
  const Shape& shape = call.shape;
  const KeyParts parts = key_parts(shape);
  const int64_t size = shape.head_dim * N * kLanes, first = queries.begin * shape.head_dim;
  const int64_t seen = seen_keys(shape, queries.begin, queries.end).end;
  float* sums = dq_part(call, 0, queries.batch, queries.head) + first;
  if (seen == 0) memset(sums, 0, sizeof(float) * static_cast<size_t>(size));
  for (int64_t part = 1; part < parts.count && part * parts.keys < seen; ++part) {
    const float* more = dq_part(call, part, queries.batch, queries.head) + first;
    for (int64_t i = 0; i < size; i += kLanes) store(sums + i, load(sums + i) + load(more + i));
  }
  Floats factor[N];
  for (int j = 0; j < N; ++j) factor[j] = in_all(static_cast<float>(shape.scale));
  store_query_lanes<T, N>(sums, shape, call.dq, queries, factor);
}

template <Type T>
void finish_dq(const BackwardCall& call, int64_t begin, int64_t end) {
  const Shape& shape = call.shape;
  const int64_t tiles = num_query_tiles(shape.q_len);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t head = task / tiles % shape.heads, batch = task / tiles / shape.heads;
    const QueryTile tile = query_tile(shape.q_len, task % tiles);
    const HeadRows queries{batch, head, tile.begin, tile.end};
    with_registers(tile.registers, [&](auto n) { finish_tile<T, n.kCount>(call, queries); });
  }
}

}  // namespace
}  // namespace ulysses::kernels::flash
