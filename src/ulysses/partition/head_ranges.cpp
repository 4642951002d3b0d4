#include "ulysses/partition/head_ranges.h"

#include <algorithm>

#include "ulysses/contract/rules.h"

namespace ulysses::partition {
namespace {

// Where rank r's query heads begin, for r = 0 … degree. Note [Cuts on group borders]: ranks own `base` or `base + 1`
// heads, and `extra` of them own one more, so the cut before rank r is r * base + e with e the number of longer ranks
// before it. Each e grows by 0 or 1 from rank to rank and ends at `extra`. Which ranks are the longer ones is free, and
// is chosen so that the most cuts fall on multiples of g: then fewest KV heads are sent twice. Ties go to the first
// ranks.
std::vector<int64_t> query_cuts(int64_t num_heads, int64_t g, int64_t degree) {
  const int64_t base = num_heads / degree;
  const int64_t extra = num_heads % degree;
  std::vector<int64_t> cuts(static_cast<size_t>(degree) + 1, 0);
  const auto cut_at = [&](int64_t r, int64_t e) { return r * base + e; };
  if (g == 1 || extra == 0) {
    for (int64_t r = 0; r <= degree; ++r) cuts[static_cast<size_t>(r)] = cut_at(r, std::min(r, extra));
    return cuts;
  }
  // best[r][e]: most borders hit by the cuts r … degree when e longer ranks lie before r; −1 if `extra` is unreachable.
  const auto width = static_cast<size_t>(extra) + 1;
  std::vector<int64_t> best((static_cast<size_t>(degree) + 1) * width, -1);
  const auto at = [&](int64_t r, int64_t e) -> int64_t& {
    return best[static_cast<size_t>(r) * width + static_cast<size_t>(e)];
  };
  at(degree, extra) = 0;
  for (int64_t r = degree - 1; r >= 0; --r) {
    for (int64_t e = std::min(r, extra); e >= 0; --e) {
      const int64_t next = std::max(at(r + 1, e), e < extra ? at(r + 1, e + 1) : -1);
      if (next >= 0) at(r, e) = next + (cut_at(r, e) % g == 0 ? 1 : 0);
    }
  }
  for (int64_t r = 0, e = 0; r < degree; ++r) {
    if (e < extra && at(r + 1, e + 1) >= at(r + 1, e)) ++e;
    cuts[static_cast<size_t>(r) + 1] = cut_at(r + 1, e);
  }
  return cuts;
}

void check_arguments(int64_t num_heads, int64_t num_kv_heads, int64_t ulysses_degree) {
  std::vector<base::Problem> problems;
  contract::add(problems, contract::check_positive("ulysses_degree", ulysses_degree, "ulysses_degree=1 or more"));
  contract::add(problems, contract::check_head_counts(num_heads, num_kv_heads));
  base::raise_if_any(std::move(problems), "head_ranges");
}

}  // namespace

bool overlaps(const std::vector<Range>& ranges) {
  int64_t end = 0;
  for (const Range& range : ranges) {
    if (range.empty()) continue;
    if (range.begin < end) return true;
    end = range.end;
  }
  return false;
}

HeadRanges head_ranges(int64_t num_heads, int64_t num_kv_heads, int64_t ulysses_degree) {
  check_arguments(num_heads, num_kv_heads, ulysses_degree);
  const int64_t g = num_heads / num_kv_heads;
  const std::vector<int64_t> cuts = query_cuts(num_heads, g, ulysses_degree);
  HeadRanges ranges;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) {
    const Range query{cuts[r], cuts[r + 1]};
    ranges.query.push_back(query);
    const int64_t kv_begin = query.begin / g;
    ranges.kv.push_back({kv_begin, query.empty() ? kv_begin : (query.end - 1) / g + 1});
  }
  return ranges;
}

std::vector<HeadRun> head_runs(const Range& query, const Range& kv, int64_t num_q_per_kv) {
  std::vector<HeadRun> runs;
  int64_t head = query.begin;
  const auto add = [&](int64_t end) {
    if (end <= head) return;
    const Range local_kv{head / num_q_per_kv - kv.begin, (end - 1) / num_q_per_kv + 1 - kv.begin};
    runs.push_back({{head - query.begin, end - query.begin}, local_kv});
    head = end;
  };
  const int64_t first_border = (query.begin + num_q_per_kv - 1) / num_q_per_kv * num_q_per_kv;
  const int64_t last_border = query.end / num_q_per_kv * num_q_per_kv;
  add(std::min(first_border, query.end));
  add(last_border);
  add(query.end);
  return runs;
}

}  // namespace ulysses::partition
