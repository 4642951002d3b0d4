#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ulysses/doctor/case.h"

namespace ulysses::doctor {

// A case with its inputs: the whole sequence, as every rank knows it. What is sent to the ranks.
// Shapes: q, grad_out [B, S, H, D | D_v], k [B, S_kv, H_kv, D], v [B, S_kv, H_kv, D_v] in the case's dtype, real tokens
//         only; mask [B, S_kv] bool, true = keep, and text_q, text_k, text_v [B, T, H | H_kv, D | D_v] where asked for.
struct Question {
  Case c;
  at::Tensor q, k, v, grad_out;
  at::Tensor mask, text_q, text_k, text_v;
  double padding = 7;        // what q, k and v hold in rows that nobody may read: a number that would show
  bool count_bytes = false;  // hand over a group that records what passes
  bool hold_result = false;  // look whether another call changes the result of this one
  int64_t odd_rank = -1;     // this rank is called with the other is_causal: ranks that disagree
};

// Seeded normal numbers, equal on every machine; q times the case's magnitude.
Question make_question(const Case& c, uint64_t seed = 1);

// q = k = 0, so that every row of the output is a mean of the values it sees. v is given; nothing else is.
Question uniform_question(const Case& c, const at::Tensor& v);

at::ScalarType scalar_type_of(const std::string& dtype);

// The rows of one rank, and where the case pads rows of `padding` behind them; q and grad_out, k and v in their own
// lengths.
at::Tensor query_shard(const Case& c, const at::Tensor& x, int64_t rank, double padding);
at::Tensor kv_shard(const Case& c, const at::Tensor& x, int64_t rank, double padding);

}  // namespace ulysses::doctor
