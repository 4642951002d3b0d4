#pragma once

#include <cstdint>
#include <vector>

#include "ulysses/partition/head_ranges.h"

namespace ulysses::partition {

// What one rank sends in one pass of a strategy, from sizes alone.
struct Traffic {
  int64_t collectives = 0;
  int64_t bytes_sent = 0;  // payload to other ranks, own block excluded
};

struct TrafficSpec {
  std::vector<int64_t> lengths;     // query tokens per rank
  std::vector<int64_t> kv_lengths;  // key tokens per rank
  int64_t batch = 1, num_heads = 1, num_kv_heads = 1, head_dim = 1, v_head_dim = 1;
  int64_t element_bytes = 4;
  bool split_layouts = false;  // q and k/v have different layouts: they travel in two collectives
};

// Forward: q, k, v heads of the destination to each rank; out heads back. Backward mirrors it with equal bytes when
// head_dim = v_head_dim; in general out has v_head_dim.
Traffic ulysses_forward_traffic(const TrafficSpec& spec, int64_t rank);
Traffic ulysses_backward_traffic(const TrafficSpec& spec, int64_t rank);
// Forward: own K/V to each other rank. Backward: the partial dK/dV of each other rank's tokens to it.
Traffic allgather_kv_forward_traffic(const TrafficSpec& spec, int64_t rank);
Traffic allgather_kv_backward_traffic(const TrafficSpec& spec, int64_t rank);

}  // namespace ulysses::partition
