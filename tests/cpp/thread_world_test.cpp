#include "ulysses/transports/thread/thread_world.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "collectives.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;
using c10d::ReduceOp;
using std::chrono::milliseconds;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

bool same(const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() == b.scalar_type() && at::equal(a, b); }
at::Tensor full(at::IntArrayRef shape, double value, at::ScalarType dtype = at::kFloat) {
  return at::full(shape, value, at::dtype(dtype));
}

class EveryWorldSize : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryWorldSize, ::testing::Values(1, 2, 4, 7));

// Rows from rank s to rank d: 0, 1 or 2, so that some blocks are empty. Every element says where it comes from.
int64_t rows(int64_t source, int64_t destination) { return (source + 2 * destination) % 3; }
double mark(int64_t source, int64_t destination) {
  return 10.0 * static_cast<double>(source) + static_cast<double>(destination);
}

struct Blocks {
  Tensors send, recv, expected;
  Splits send_splits, recv_splits;
};
Blocks uneven_blocks(int64_t rank, int64_t size, at::ScalarType dtype = at::kFloat) {
  Blocks blocks;
  for (int64_t peer = 0; peer < size; ++peer) {
    blocks.send_splits.push_back(rows(rank, peer));
    blocks.recv_splits.push_back(rows(peer, rank));
    blocks.send.push_back(full({rows(rank, peer), 3}, mark(rank, peer), dtype));
    blocks.expected.push_back(full({rows(peer, rank), 3}, mark(peer, rank), dtype));
    blocks.recv.push_back(full({rows(peer, rank), 3}, 99, dtype));
  }
  return blocks;
}

TEST_P(EveryWorldSize, AllToAllWithUnevenAndEmptySplits) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kBool}) {
    run_ranks(GetParam(), [&](int64_t rank, const GroupPtr& group) {
      const auto blocks = uneven_blocks(rank, GetParam(), dtype);
      auto recv = at::cat(blocks.recv);
      all_to_all(*group, recv, at::cat(blocks.send), blocks.recv_splits, blocks.send_splits)->wait();
      EXPECT_TRUE(same(recv, at::cat(blocks.expected)));
    });
  }
}

TEST_P(EveryWorldSize, AllToAllInListForm) {
  run_ranks(GetParam(), [&](int64_t rank, const GroupPtr& group) {
    auto blocks = uneven_blocks(rank, GetParam());
    group->alltoall(blocks.recv, blocks.send)->wait();
    for (size_t peer = 0; peer < blocks.recv.size(); ++peer) {
      EXPECT_TRUE(same(blocks.recv[peer], blocks.expected[peer]));
    }
  });
}

TEST_P(EveryWorldSize, AllToAllWithoutSplitsCutsEvenly) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    auto recv = at::empty({2 * size});
    auto send = at::arange(2 * size, at::kFloat).add_(static_cast<double>(100 * rank));
    all_to_all(*group, recv, send)->wait();
    for (int64_t peer = 0; peer < size; ++peer) {
      EXPECT_EQ(recv[2 * peer].item<float>(), static_cast<float>(100 * peer + 2 * rank));
      EXPECT_EQ(recv[2 * peer + 1].item<float>(), static_cast<float>(100 * peer + 2 * rank + 1));
    }
  });
}

TEST_P(EveryWorldSize, WhollyEmptyTensorsPass) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t, const GroupPtr& group) {
    all_to_all(*group, at::empty({0, 3}), at::empty({0, 3}), Splits(static_cast<size_t>(size), 0),
               Splits(static_cast<size_t>(size), 0))
        ->wait();
    all_to_all(*group, at::empty({0}), at::empty({0}))->wait();
    all_gather(*group, at::empty({0}), at::empty({0}))->wait();
    reduce_scatter(*group, at::empty({0}), at::empty({0}))->wait();
    EXPECT_EQ(all_reduce(*group, at::empty({0})).numel(), 0);
  });
}

TEST_P(EveryWorldSize, AllGatherEvenAndUneven) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    auto recv = at::empty({size, 2});
    all_gather(*group, recv, full({1, 2}, static_cast<double>(rank)))->wait();
    std::vector<Tensors> lists(1);
    for (int64_t peer = 0; peer < size; ++peer) {
      EXPECT_TRUE(same(recv[peer], full({2}, static_cast<double>(peer))));
      lists[0].push_back(at::empty({peer}));
    }
    Tensors mine{full({rank}, static_cast<double>(rank))};
    group->allgather(lists, mine)->wait();
    for (int64_t peer = 0; peer < size; ++peer) {
      EXPECT_TRUE(same(lists[0][static_cast<size_t>(peer)], full({peer}, static_cast<double>(peer))));
    }
  });
}

TEST_P(EveryWorldSize, AllGatherIntoTheBufferThatHoldsTheInput) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    auto recv = full({size}, -1);
    recv[rank].fill_(static_cast<double>(rank));
    all_gather(*group, recv, recv.narrow(0, rank, 1))->wait();
    EXPECT_TRUE(same(recv, at::arange(size, at::kFloat)));
  });
}

TEST_P(EveryWorldSize, ReductionsHaveTheirClosedForm) {
  const int64_t size = GetParam();
  const auto n = static_cast<double>(size);
  double factorial = 1;
  for (int64_t i = 2; i <= size; ++i) factorial *= static_cast<double>(i);
  const std::vector<std::pair<ReduceOp, double>> cases = {{ReduceOp::SUM, n * (n + 1) / 2},
                                                          {ReduceOp::AVG, (n + 1) / 2},
                                                          {ReduceOp::PRODUCT, factorial},
                                                          {ReduceOp::MIN, 1},
                                                          {ReduceOp::MAX, n}};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
    for (const auto& [op, expected] : cases) {
      if (op.op_ == ReduceOp::AVG && dtype == at::kLong) continue;
      run_ranks(size, [&, op = op, value = expected](int64_t rank, const GroupPtr& group) {
        const auto mine = static_cast<double>(rank + 1);
        EXPECT_TRUE(same(all_reduce(*group, full({5}, mine, dtype), op), full({5}, value, dtype)));
        auto part = at::empty({2}, at::dtype(dtype));
        reduce_scatter(*group, part, full({2 * size}, mine, dtype), op)->wait();
        EXPECT_TRUE(same(part, full({2}, value, dtype)));
      });
    }
  }
}

TEST_P(EveryWorldSize, ReduceScatterGivesEachRankItsPart) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    // Rank r brings p for rank p: rank p gets W * p. The result overwrites a part of the input that peers read.
    auto input = at::arange(size, at::kFloat);
    auto output = input.narrow(0, (rank + 1) % size, 1);
    reduce_scatter(*group, output, input)->wait();
    EXPECT_EQ(output.item<float>(), static_cast<float>(size * rank));
    std::vector<Tensors> lists(1);
    for (int64_t peer = 0; peer < size; ++peer) lists[0].push_back(full({peer + 1}, static_cast<double>(peer)));
    Tensors mine{at::empty({rank + 1})};
    group->reduce_scatter(mine, lists)->wait();
    EXPECT_TRUE(same(mine[0], full({rank + 1}, static_cast<double>(size * rank))));
  });
}

TEST(ThreadWorld, SumsInRankOrderOnEveryRank) {
  const std::vector<double> values = {1e8, 1, -1e8, 1};  // in float32 and in this order: 1; from the right: 0 or 2
  run_ranks(4, [&](int64_t rank, const GroupPtr& group) {
    EXPECT_EQ(all_reduce(*group, full({1}, values[static_cast<size_t>(rank)])).item<float>(), 1.0F);
  });
}

TEST(ThreadWorld, SumsSixteenBitFloatsInFloat32) {
  // 256 + 1 is not a bfloat16: rounded at each step the sum would stay 256.
  run_ranks(7, [&](int64_t rank, const GroupPtr& group) {
    const auto sum = all_reduce(*group, full({1}, rank == 0 ? 256 : 1, at::kBFloat16));
    EXPECT_EQ(sum.item<float>(), 262.0F);
  });
}

TEST_P(EveryWorldSize, BroadcastGatherScatterFromTheLastRank) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    const bool root = rank == size - 1;
    c10d::BroadcastOptions broadcast;
    c10d::GatherOptions gather;
    c10d::ScatterOptions scatter;
    broadcast.rootRank = gather.rootRank = scatter.rootRank = size - 1;
    Tensors mine{full({2}, static_cast<double>(rank))};
    group->broadcast(mine, broadcast)->wait();
    EXPECT_TRUE(same(mine[0], full({2}, static_cast<double>(size - 1))));

    std::vector<Tensors> lists(root ? 1 : 0);
    for (int64_t peer = 0; root && peer < size; ++peer) lists[0].push_back(at::empty({peer}));
    mine = {full({rank}, static_cast<double>(rank))};
    group->gather(lists, mine, gather)->wait();
    for (int64_t peer = 0; root && peer < size; ++peer) {
      EXPECT_TRUE(same(lists[0][static_cast<size_t>(peer)], full({peer}, static_cast<double>(peer))));
    }
    mine = {full({rank}, -1)};
    group->scatter(mine, lists, scatter)->wait();
    EXPECT_TRUE(same(mine[0], full({rank}, static_cast<double>(rank))));
  });
}

TEST_P(EveryWorldSize, SendRecvRing) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    const int64_t left = (rank + size - 1) % size;
    auto first = at::empty({2}), second = at::empty({3}), other = at::empty({1});
    // All receives are posted before anything is sent and are waited for out of order.
    auto first_work = recv(*group, first, left, 7), second_work = recv(*group, second, left, 7);
    auto other_work = recv(*group, other, left, 8);
    EXPECT_FALSE(size == 1 && first_work->isCompleted());
    send(*group, full({2}, static_cast<double>(rank)), (rank + 1) % size, 7)->wait();
    send(*group, full({3}, static_cast<double>(rank + 50)), (rank + 1) % size, 7)->wait();
    send(*group, full({1}, static_cast<double>(rank + 90)), (rank + 1) % size, 8)->wait();
    other_work->wait();
    second_work->wait();
    first_work->wait();
    EXPECT_TRUE(same(first, full({2}, static_cast<double>(left))));
    EXPECT_TRUE(same(second, full({3}, static_cast<double>(left + 50))));
    EXPECT_TRUE(same(other, full({1}, static_cast<double>(left + 90))));
    EXPECT_TRUE(first_work->isCompleted());
  });
}

TEST(ThreadWorld, WorksHaveResultsAndFutures) {
  run_ranks(2, [&](int64_t rank, const GroupPtr& group) {
    auto recv_buffer = at::empty({2});
    auto work = all_gather(*group, recv_buffer, full({1}, static_cast<double>(rank)));
    EXPECT_TRUE(work->isCompleted());
    ASSERT_EQ(work->result().size(), 1U);
    EXPECT_TRUE(work->result()[0].is_same(recv_buffer));
    auto future = work->getFuture();
    future->wait();
    EXPECT_TRUE(future->value().toTensorVector()[0].is_same(recv_buffer));
  });
}

TEST(ThreadWorld, ManyCollectivesWithRanksThatDrift) {
  run_ranks(4, [&](int64_t rank, const GroupPtr& group) {
    for (int64_t i = 0; i < 1500; ++i) {
      if (i % 4 == rank && i % 300 < 4) std::this_thread::sleep_for(milliseconds(2));
      const auto mine = static_cast<double>(rank + i);
      ASSERT_EQ(all_reduce(*group, full({3}, mine, at::kDouble))[2].item<double>(), static_cast<double>(6 + 4 * i));
      auto recv_buffer = at::empty({4}, at::kDouble);
      all_to_all(*group, recv_buffer, full({4}, mine, at::kDouble))->wait();
      ASSERT_EQ(recv_buffer[(rank + 1) % 4].item<double>(), static_cast<double>((rank + 1) % 4 + i));
    }
  });
}

TEST(ThreadWorld, GroupsAreFoundByNameFromAnyThreadWhileTheWorldLives) {
  std::vector<std::string> names;
  {
    ThreadWorld world(2), other(2);
    for (int64_t rank = 0; rank < 2; ++rank) {
      names.push_back(world.group(rank)->getGroupName());
      EXPECT_NE(names.back(), other.group(rank)->getGroupName());
      std::thread([&] { EXPECT_EQ(c10d::resolve_process_group(names.back())->getRank(), rank); }).join();
    }
    EXPECT_NE(names[0], names[1]);
  }
  for (const auto& name : names) EXPECT_THROW(c10d::resolve_process_group(name), c10::Error);
}

TEST(ThreadWorld, RanksShareTheCallersThreadsAndItsSettingsStay) {
  const int before = at::get_num_threads();
  at::set_num_threads(9);
  const c10::AutoGradMode no_grad(false);
  run_ranks(4, [&](int64_t, const GroupPtr&) {
    EXPECT_EQ(at::get_num_threads(), 2);  // 9 / 4
    EXPECT_TRUE(c10::GradMode::is_enabled());
  });
  EXPECT_EQ(at::get_num_threads(), 9);
  at::set_num_threads(1);
  run_ranks(1, [&](int64_t, const GroupPtr&) { EXPECT_EQ(at::get_num_threads(), 1); });
  at::set_num_threads(before);
}

// y = what the ranks' x look like after an all-to-all; backward is the all-to-all of the gradients.
struct Exchange : torch::autograd::Function<Exchange> {
  static Variable forward(AutogradContext* context, const Variable& x, const GroupPtr& group) {
    context->saved_data["group"] = group;
    auto y = at::empty_like(x);
    all_to_all(*group, y, x.detach())->wait();
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto dx = at::empty_like(grads[0]);
    all_to_all(*context->saved_data["group"].toCustomClass<c10d::ProcessGroup>(), dx, grads[0].contiguous())->wait();
    return {dx, Variable()};
  }
};

TEST_P(EveryWorldSize, BackwardRunsCollectivesOnTheRankThreads) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& group) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto x = full({size}, static_cast<double>(rank)).requires_grad_();
      // Rank p weights what it got by p + 1 and squares it: L = sum over r, p of (p + 1)² r², dL/dx_r[p] = 2 (p + 1)²
      // r.
      const auto y = Exchange::apply(x, group) * static_cast<double>(rank + 1);
      y.square().sum().backward();
      const auto weight = at::arange(1, size + 1, at::kFloat).square();
      EXPECT_TRUE(same(x.grad(), weight * static_cast<double>(2 * rank)));
    }
  });
}

}  // namespace
}  // namespace ulysses::transports
