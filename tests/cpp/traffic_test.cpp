#include "ulysses/partition/traffic.h"

#include <gtest/gtest.h>

namespace ulysses::partition {
namespace {

TrafficSpec even() {
  return {.lengths = {16, 16, 16, 16},
          .kv_lengths = {16, 16, 16, 16},
          .batch = 2,
          .num_heads = 8,
          .num_kv_heads = 8,
          .head_dim = 32,
          .v_head_dim = 32,
          .element_bytes = 4};
}

TEST(Traffic, CountsCollectives) {
  TrafficSpec spec = even();
  EXPECT_EQ(ulysses_forward_traffic(spec, 0).collectives, 2);
  EXPECT_EQ(ulysses_backward_traffic(spec, 0).collectives, 2);
  EXPECT_EQ(allgather_kv_forward_traffic(spec, 0).collectives, 1);
  EXPECT_EQ(allgather_kv_backward_traffic(spec, 0).collectives, 1);
  spec.split_layouts = true;
  EXPECT_EQ(ulysses_forward_traffic(spec, 0).collectives, 3);
  EXPECT_EQ(ulysses_backward_traffic(spec, 0).collectives, 3);
  EXPECT_EQ(allgather_kv_forward_traffic(spec, 0).collectives, 1);
}

TEST(Traffic, AGroupOfOneSendsNothing) {
  const TrafficSpec spec{.lengths = {64}, .kv_lengths = {64}, .num_heads = 8, .num_kv_heads = 2, .head_dim = 32};
  for (const auto& traffic : {ulysses_forward_traffic(spec, 0), ulysses_backward_traffic(spec, 0),
                              allgather_kv_forward_traffic(spec, 0), allgather_kv_backward_traffic(spec, 0)}) {
    EXPECT_EQ(traffic.collectives, 0);
    EXPECT_EQ(traffic.bytes_sent, 0);
  }
}

TEST(Traffic, EvenShardsFollowTheClosedForm) {
  // Ulysses, even: 4 tensors of S_local * H * D elements, of which (W − 1) / W leave the rank.
  const int64_t shard_bytes = 2 * 16 * 8 * 32 * 4;
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(ulysses_forward_traffic(even(), rank).bytes_sent, 4 * shard_bytes * 3 / 4);
    EXPECT_EQ(ulysses_backward_traffic(even(), rank).bytes_sent, 4 * shard_bytes * 3 / 4);
    EXPECT_EQ(allgather_kv_forward_traffic(even(), rank).bytes_sent, 2 * shard_bytes * 3);
    EXPECT_EQ(allgather_kv_backward_traffic(even(), rank).bytes_sent, 2 * shard_bytes * 3);
  }
}

TEST(Traffic, UnevenShardsTornGroupsAndValueDim) {
  // H=3, H_kv=1, U=2: heads [0,2) and [2,3); both ranks need the one KV head. Tokens 5 and 2, keys 4 and 3; D=10,
  // D_v=1.
  const TrafficSpec spec{.lengths = {5, 2},
                         .kv_lengths = {4, 3},
                         .batch = 1,
                         .num_heads = 3,
                         .num_kv_heads = 1,
                         .head_dim = 10,
                         .v_head_dim = 1,
                         .element_bytes = 1,
                         .split_layouts = true};
  EXPECT_EQ(ulysses_forward_traffic(spec, 0).bytes_sent, 5 * 1 * 10 + 4 * 1 * 11 + 2 * 2 * 1);
  EXPECT_EQ(ulysses_forward_traffic(spec, 1).bytes_sent, 2 * 2 * 10 + 3 * 1 * 11 + 5 * 1 * 1);
  EXPECT_EQ(ulysses_backward_traffic(spec, 0).bytes_sent, 5 * 1 * 1 + 2 * 2 * 10 + 3 * 1 * 11);
  EXPECT_EQ(ulysses_backward_traffic(spec, 1).bytes_sent, 2 * 2 * 1 + 5 * 1 * 10 + 4 * 1 * 11);
  EXPECT_EQ(allgather_kv_forward_traffic(spec, 0).bytes_sent, 4 * 11);
  EXPECT_EQ(allgather_kv_backward_traffic(spec, 0).bytes_sent, 3 * 11);
}

TEST(Traffic, RanksWithoutHeadsReceiveNoHeads) {
  const TrafficSpec spec{.lengths = {4, 4, 4},
                         .kv_lengths = {4, 4, 4},
                         .num_heads = 1,
                         .num_kv_heads = 1,
                         .head_dim = 8,
                         .v_head_dim = 8,
                         .element_bytes = 2};
  EXPECT_EQ(ulysses_forward_traffic(spec, 0).bytes_sent, 2 * 4 * 8 * 2);  // only the output, to both others
  EXPECT_EQ(ulysses_forward_traffic(spec, 2).bytes_sent, 3 * 4 * 8 * 2);  // q, k, v to rank 0
}

}  // namespace
}  // namespace ulysses::partition
