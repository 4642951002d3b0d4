#pragma once

#include <vector>

#include "ulysses/partition/head_ranges.h"

namespace ulysses::kernels {

// A rectangle of the attention matrix that one kernel call covers, in global positions.
struct Block {
  partition::Range q;
  partition::Range kv;
  bool is_causal = false;  // of causal_blocks(): only on squares that lie on the diagonal, q == kv
  bool operator==(const Block&) const = default;
};

// Cuts queries q against keys kv into blocks that a kernel can run without a mask. The blocks are disjoint and cover
// exactly the pairs with key ≤ query (all pairs if not causal); none is empty.
//
//            c     s     e      d          s = max(a, c), e = min(b, d)
//        a   ·  ·  ·  ·  ·  ·              no keys yet: no block
//        s   full  \                       [s, e) × [c, s) full, [s, e)² on the diagonal
//        e   full full                     [e, b) × [c, d) full
//        b
//
// Not causal: one block. Causal: at most one square and two full rectangles; a query row lies in at most two blocks.
std::vector<Block> causal_blocks(const partition::Range& q, const partition::Range& kv, bool is_causal);

}  // namespace ulysses::kernels
