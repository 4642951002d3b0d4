#pragma once

#include <cstdint>

// What our CPU attention kernel is told: pointers, strides and sizes. Seen by files that are compiled for a newer
// processor, so nothing here is inline: their copy of it could be the one that other files are linked to.
namespace ulysses::kernels::flash {

// [batch, tokens, heads, head_dim] where it lies. Strides in elements; that of the last axis is 1.
struct Rows {
  const void* data;
  int64_t batch, token, head;
};
struct MutableRows {
  void* data;
  int64_t batch, token, head;
};

struct Shape {
  int64_t batch, q_len, kv_len, heads, kv_heads;
  int64_t head_dim;  // a multiple of 16, at most 256
  double scale;      // normal in float32: 0 · −inf of a hidden key would be NaN
  bool is_causal;
  int64_t causal_offset;  // query i sees keys ≤ i + causal_offset
};

struct ForwardCall {
  Shape shape;
  Rows q, k, v;
  MutableRows out;
  float* lse;  // [batch, heads, q_len], natural log; −inf for a row that sees no key
  uint32_t *packed_k, *packed_v;
};

struct BackwardCall {
  Shape shape;
  Rows q, k, v, out, grad_out;
  const float* lse;       // [batch, heads, q_len] of the forward, +inf for a row without keys
  const float* grad_lse;  // like lse; null: none
  MutableRows dq, dk, dv;
  uint32_t *packed_k, *packed_v, *packed_k_columns;
  float* row_dot;  // [batch, heads, q_len]: ⟨grad_out, out⟩ − grad_lse
  float* dq_sums;
};

// Words of 4 bytes, each buffer aligned to 64 bytes.
struct ForwardSizes {
  int64_t packed_k, packed_v, scratch;  // scratch: of one thread
  int64_t pack_tasks, tile_tasks;
};
struct BackwardSizes {
  int64_t packed_k, packed_v, packed_k_columns, dq_sums, scratch;
  int64_t pack_tasks, row_tasks, key_tasks, finish_tasks;
};

// The kernel for one element type and one set of processor features. Each step is run over all of its tasks [0, n), in
// any split over threads, before the next: the result does not depend on the split, bit for bit.
struct Instance {
  ForwardSizes (*forward_sizes)(const Shape& shape);
  void (*pack)(const ForwardCall& call, int64_t begin, int64_t end);
  void (*attend)(const ForwardCall& call, uint32_t* scratch, int64_t begin, int64_t end);

  BackwardSizes (*backward_sizes)(const Shape& shape);
  void (*pack_backward)(const BackwardCall& call, int64_t begin, int64_t end);
  void (*dot_rows)(const BackwardCall& call, int64_t begin, int64_t end);
  void (*attend_backward)(const BackwardCall& call, uint32_t* scratch, int64_t begin, int64_t end);
  void (*finish_dq)(const BackwardCall& call, int64_t begin, int64_t end);
};

// For processors with AVX2 (and FMA, F16C); with AVX-512 (F, DQ, BW, VL); bfloat16 with AVX512_BF16 besides. float16 is
// widened to float32.
extern const Instance kAvx2Float32;
extern const Instance kAvx2Float16;
extern const Instance kAvx512Float32;
extern const Instance kAvx512Float16;
extern const Instance kAvx512Bfloat16;

}  // namespace ulysses::kernels::flash
