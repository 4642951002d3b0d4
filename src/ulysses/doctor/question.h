#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ulysses/doctor/case.h"

namespace ulysses::doctor {

// A case with its inputs: the whole sequence, as every rank knows it. What is sent to the ranks.
// Shapes: q, grad_out [B, S, H, D | D_v], k [B, S_kv, H_kv, D], v [B, S_kv, H_kv, D_v] in the case's dtype, real tokens
//         only. Where asked for: mask as Case::mask says, bool (true = visible) or added to the scores, over the joined
//         sequence; sinks [H]; text_q, text_k, text_v, text_grad_out [B, T, H | H_kv, D | D_v]; grad_lse [B, H, S] and
//         text_grad_lse [B, H, T].
struct Question {
  Case c;
  at::Tensor q, k, v, grad_out;
  at::Tensor mask, sinks, text_q, text_k, text_v, text_grad_out, grad_lse, text_grad_lse;
  double padding = 7;        // what q, k and v hold in rows that nobody may read: a number that would show
  bool count_bytes = false;  // hand over a group that records what passes
  bool hold_result = false;  // look whether another call changes the result of this one
  int64_t odd_rank = -1;     // this rank is called with the other is_causal: ranks that disagree

  // Every tensor, in one order.
  template <typename Self>
  static auto tensors(Self& x) {
    return std::vector{&x.q,      &x.k,      &x.v,      &x.grad_out,      &x.mask,     &x.sinks,
                       &x.text_q, &x.text_k, &x.text_v, &x.text_grad_out, &x.grad_lse, &x.text_grad_lse};
  }
};

// Seeded normal numbers, equal on every machine; q times the case's magnitude.
Question make_question(const Case& c, uint64_t seed = 1);

// q = k = 0, text too, so that every row of the output is a mean of the values it sees. v is given, the text's is 0; a
// mask and sinks are those of the case.
Question uniform_question(const Case& c, const at::Tensor& v);

// The same question without its mask, or without its sinks.
void drop_mask(Question& question);
void drop_sinks(Question& question);

at::ScalarType scalar_type_of(const std::string& dtype);

// The rows of one rank, and where the case pads rows of `padding` behind them; q and grad_out, k and v in their own
// lengths.
at::Tensor query_shard(const Case& c, const at::Tensor& x, int64_t rank, double padding);
at::Tensor kv_shard(const Case& c, const at::Tensor& x, int64_t rank, double padding);
// The rank's part of a mask; rows and columns behind the real ones, which nobody may read, let everything through.
at::Tensor mask_shard(const Case& c, const at::Tensor& mask, int64_t rank);

// Text and sequence of a tensor with its tokens in `dim`, as one sequence, and both again; x itself without text.
at::Tensor join_text(const Case& c, const at::Tensor& text, const at::Tensor& x, int64_t dim = 1);
struct TextAndRows {
  at::Tensor text, rows;
};
TextAndRows part_text(const Case& c, const at::Tensor& joined, int64_t dim = 1);

}  // namespace ulysses::doctor
