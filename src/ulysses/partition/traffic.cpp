#include "ulysses/partition/traffic.h"

#include <algorithm>

namespace ulysses::partition {
namespace {

int64_t world_size(const TrafficSpec& spec) { return static_cast<int64_t>(spec.lengths.size()); }

// The sum of term(other) over the other ranks, in bytes.
template <typename Term>
int64_t bytes_to_others(const TrafficSpec& spec, int64_t rank, Term term) {
  int64_t elements = 0;
  for (int64_t other = 0; other < world_size(spec); ++other) {
    if (other != rank) elements += term(static_cast<size_t>(other));
  }
  return elements * spec.batch * spec.element_bytes;
}

int64_t ulysses_collectives(const TrafficSpec& spec) {
  if (world_size(spec) == 1) return 0;
  return spec.split_layouts ? 3 : 2;
}

int64_t allgather_kv_collectives(const TrafficSpec& spec) { return world_size(spec) == 1 ? 0 : 1; }

}  // namespace

Traffic ulysses_forward_traffic(const TrafficSpec& spec, int64_t rank) {
  const HeadRanges heads = head_ranges(spec.num_heads, spec.num_kv_heads, world_size(spec));
  const auto own = static_cast<size_t>(rank);
  const int64_t kv_dim = spec.head_dim + spec.v_head_dim;
  const int64_t bytes = bytes_to_others(spec, rank, [&](size_t other) {
    const int64_t in = spec.lengths.at(own) * heads.query[other].size() * spec.head_dim +
                       spec.kv_lengths.at(own) * heads.kv[other].size() * kv_dim;
    const int64_t out = spec.lengths[other] * heads.query.at(own).size() * spec.v_head_dim;
    return in + out;
  });
  return {ulysses_collectives(spec), bytes};
}

Traffic ulysses_backward_traffic(const TrafficSpec& spec, int64_t rank) {
  const HeadRanges heads = head_ranges(spec.num_heads, spec.num_kv_heads, world_size(spec));
  const auto own = static_cast<size_t>(rank);
  const int64_t kv_dim = spec.head_dim + spec.v_head_dim;
  const int64_t bytes = bytes_to_others(spec, rank, [&](size_t other) {
    const int64_t in = spec.lengths.at(own) * heads.query[other].size() * spec.v_head_dim;
    const int64_t out = spec.lengths[other] * heads.query.at(own).size() * spec.head_dim +
                        spec.kv_lengths.at(other) * heads.kv.at(own).size() * kv_dim;
    return in + out;
  });
  return {ulysses_collectives(spec), bytes};
}

Traffic allgather_kv_forward_traffic(const TrafficSpec& spec, int64_t rank) {
  const int64_t kv_row = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim);
  const int64_t own_rows = spec.kv_lengths.at(static_cast<size_t>(rank));
  return {allgather_kv_collectives(spec), bytes_to_others(spec, rank, [&](size_t) { return own_rows * kv_row; })};
}

Traffic allgather_kv_backward_traffic(const TrafficSpec& spec, int64_t rank) {
  const int64_t kv_row = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim);
  return {allgather_kv_collectives(spec),
          bytes_to_others(spec, rank, [&](size_t other) { return spec.kv_lengths.at(other) * kv_row; })};
}

}  // namespace ulysses::partition
