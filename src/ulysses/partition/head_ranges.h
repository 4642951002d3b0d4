#pragma once

#include <cstdint>
#include <vector>

namespace ulysses::partition {

// Half-open [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool operator==(const Range&) const = default;
};

// Which heads each Ulysses rank owns. Query ranges tile [0, H); KV ranges may overlap between neighbours, then both
// receive that head and its gradient is the sum of what comes back.
struct HeadRanges {
  std::vector<Range> query;
  std::vector<Range> kv;
};

// Whether any head lies in two of the ranges, which are in ascending order.
bool overlaps(const std::vector<Range>& ranges);

// The one rule of head sharding: query ranges balanced within one head, cut on group borders where that keeps the
// balance; kv = [a / g, ceil(b / g)) with g = num_heads / num_kv_heads, empty when a = b.
// Covers MHA, GQA, MQA, H not divisible by the degree, H_kv < degree and degree > H (ranks without heads).
HeadRanges head_ranges(int64_t num_heads, int64_t num_kv_heads, int64_t ulysses_degree);

// A run of query heads with a uniform number of query heads per KV head, in local head numbers of the rank:
// query ⊂ [0, hq), kv ⊂ [0, hkv), query.size() % kv.size() == 0.
struct HeadRun {
  Range query;
  Range kv;
  bool operator==(const HeadRun&) const = default;
};

// Cuts one rank's (possibly torn) range into at most three uniform runs: partial group, whole groups, partial group.
std::vector<HeadRun> head_runs(const Range& query, const Range& kv, int64_t num_q_per_kv);

}  // namespace ulysses::partition
