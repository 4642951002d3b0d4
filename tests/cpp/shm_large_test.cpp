#include <gtest/gtest.h>

#include "own_groups.h"
#include "ulysses/transports/shm/shm_layout.h"

// Data that passes the segment in several chunks, none of which ends where a block does.
namespace ulysses::transports {
namespace {

using namespace ulysses::testing;
using c10d::ReduceOp;

constexpr int64_t kSize = 3;
constexpr int64_t kRows = 5 * kChunkBytes / 16 / 2 + 7;  // of 16 bytes: two chunks and a half

// rows × 4 int32 values that say where they come from and which row they are.
at::Tensor rows_of(int64_t source, int64_t destination, int64_t rows) {
  const auto first = 1'000'000'000 + 100'000'000 * source + 10'000'000 * destination;
  return at::arange(first, first + 4 * rows, at::kInt).view({rows, 4});
}

int64_t rows_between(int64_t source, int64_t destination) {
  return source == 1 && destination == 2 ? 0 : kRows / (1 + source) + destination;
}

TEST(ShmLarge, AllToAllOfUnevenBlocks) {
  run_shm_ranks(kSize, [](int64_t rank, const GroupPtr& group) {
    Tensors send, expected;
    Splits send_rows, recv_rows;
    for (int64_t peer = 0; peer < kSize; ++peer) {
      send_rows.push_back(rows_between(rank, peer));
      recv_rows.push_back(rows_between(peer, rank));
      send.push_back(rows_of(rank, peer, send_rows.back()));
      expected.push_back(rows_of(peer, rank, recv_rows.back()));
    }
    auto recv = at::zeros_like(at::cat(expected));
    all_to_all(*group, recv, at::cat(send), recv_rows, send_rows)->wait();
    EXPECT_TRUE(at::equal(recv, at::cat(expected)));
    Tensors parts;
    for (const auto& part : expected) parts.push_back(at::zeros_like(part));
    group->alltoall(parts, send)->wait();
    EXPECT_TRUE(at::equal(at::cat(parts), at::cat(expected)));
  });
}

TEST(ShmLarge, GathersBroadcastsAndScatters) {
  run_shm_ranks(kSize, [](int64_t rank, const GroupPtr& group) {
    auto whole = at::zeros({kSize * kRows, 4}, at::kInt);
    whole.narrow(0, rank * kRows, kRows).copy_(rows_of(rank, 0, kRows));
    all_gather(*group, whole, whole.narrow(0, rank * kRows, kRows))->wait();  // from its place in the result
    Tensors expected;
    for (int64_t peer = 0; peer < kSize; ++peer) expected.push_back(rows_of(peer, 0, kRows));
    EXPECT_TRUE(at::equal(whole, at::cat(expected)));

    c10d::BroadcastOptions broadcast;
    c10d::GatherOptions gather;
    c10d::ScatterOptions scatter;
    broadcast.rootRank = gather.rootRank = scatter.rootRank = 1;
    Tensors mine{rows_of(rank, 0, kRows)};
    group->broadcast(mine, broadcast)->wait();
    EXPECT_TRUE(at::equal(mine[0], rows_of(1, 0, kRows)));
    std::vector<Tensors> lists(rank == 1 ? 1 : 0);
    for (int64_t peer = 0; rank == 1 && peer < kSize; ++peer) lists[0].push_back(at::zeros_like(expected[0]));
    mine = {rows_of(rank, 0, kRows)};
    group->gather(lists, mine, gather)->wait();
    EXPECT_TRUE(rank != 1 || at::equal(at::cat(lists[0]), at::cat(expected)));
    mine[0].zero_();
    group->scatter(mine, lists, scatter)->wait();
    EXPECT_TRUE(at::equal(mine[0], rows_of(rank, 0, kRows)));
  });
}

TEST(ShmLarge, ReducesInPlaceAndAcrossChunks) {
  run_shm_ranks(kSize, [](int64_t rank, const GroupPtr& group) {
    for (const auto dtype : {at::kDouble, at::kBFloat16}) {  // the values stay below 2^8: exact in both
      const auto ramp = at::arange(kSize * kRows, at::kLong).remainder(64);
      const auto sum = all_reduce(*group, ramp.add(rank).to(dtype));
      EXPECT_TRUE(at::equal(sum, ramp.mul(3).add(3).to(dtype)));
      const auto input = ramp.add(rank).to(dtype);
      auto output = input.narrow(0, kRows / 2, kRows);  // inside what the others read
      reduce_scatter(*group, output, input, ReduceOp::MAX)->wait();
      EXPECT_TRUE(at::equal(output, ramp.narrow(0, rank * kRows, kRows).add(2).to(dtype)));
    }
  });
}

TEST(ShmLarge, EverySizeAroundAChunk) {
  run_shm_ranks(2, [](int64_t rank, const GroupPtr& group) {
    for (const int64_t bytes : {kChunkBytes - 1, kChunkBytes, kChunkBytes + 1, 2 * kChunkBytes, 3 * kChunkBytes - 1}) {
      const auto pattern = at::arange(bytes, at::kLong).remainder(251).to(at::kByte);
      auto whole = at::zeros({2 * bytes}, at::kByte);
      all_gather(*group, whole, pattern.add(rank))->wait();
      EXPECT_TRUE(at::equal(whole, at::cat({pattern, pattern.add(1)}))) << bytes;
    }
  });
}

TEST(ShmLarge, Messages) {
  run_shm_ranks(2, [](int64_t rank, const GroupPtr& group) {
    const auto message = rows_of(rank, 0, kRows);
    auto received = at::zeros_like(message);
    send(*group, message, 1 - rank)->wait();  // both send first
    recv(*group, received, 1 - rank)->wait();
    EXPECT_TRUE(at::equal(received, rows_of(1 - rank, 0, kRows)));
    for (int i = 0; i < 50; ++i) {  // more than wait untaken: the sender waits for the receiver
      if (rank == 0) send(*group, at::full({1}, static_cast<double>(i)), 1)->wait();
      auto one = at::zeros({1});
      if (rank == 1) recv(*group, one, 0)->wait();
      EXPECT_EQ(one.item<float>(), static_cast<float>(rank * i));
    }
  });
}

}  // namespace
}  // namespace ulysses::transports
