#include "ulysses/kernels/causal_blocks.h"

#include <algorithm>

namespace ulysses::kernels {

using partition::Range;

std::vector<Block> causal_blocks(const Range& q, const Range& kv, bool is_causal) {
  if (q.empty() || kv.empty()) return {};
  if (!is_causal || kv.end <= q.begin) return {{q, kv, false}};
  if (q.end <= kv.begin) return {};

  const Range square{std::max(q.begin, kv.begin), std::min(q.end, kv.end)};
  std::vector<Block> blocks;
  if (kv.begin < square.begin) blocks.push_back({square, {kv.begin, square.begin}, false});
  blocks.push_back({square, square, true});
  if (square.end < q.end) blocks.push_back({{square.end, q.end}, kv, false});
  return blocks;
}

}  // namespace ulysses::kernels
