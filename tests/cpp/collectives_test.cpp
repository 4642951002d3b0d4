#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "own_groups.h"

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

// Ranks of each of our transports, in worlds of several sizes.
class EveryGroup : public ::testing::TestWithParam<std::tuple<Transport, int64_t>> {
 protected:
  const Transport transport = std::get<0>(GetParam());
  const int64_t size = std::get<1>(GetParam());
  void run(const RankFunction& fn) const { run_ranks_over(transport, size, fn); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryGroup, ::testing::Combine(every_transport, ::testing::Values(1, 2, 4, 7)));

class EveryTransport : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryTransport, every_transport);

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

TEST_P(EveryGroup, AllToAllWithUnevenAndEmptySplits) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kBool}) {
    run([&](int64_t rank, const GroupPtr& group) {
      const auto blocks = uneven_blocks(rank, size, dtype);
      auto recv = at::cat(blocks.recv);
      all_to_all(*group, recv, at::cat(blocks.send), blocks.recv_splits, blocks.send_splits)->wait();
      EXPECT_TRUE(same(recv, at::cat(blocks.expected)));
    });
  }
}

TEST_P(EveryGroup, AllToAllInListForm) {
  run([&](int64_t rank, const GroupPtr& group) {
    auto blocks = uneven_blocks(rank, size);
    group->alltoall(blocks.recv, blocks.send)->wait();
    for (size_t peer = 0; peer < blocks.recv.size(); ++peer) {
      EXPECT_TRUE(same(blocks.recv[peer], blocks.expected[peer]));
    }
  });
}

TEST_P(EveryGroup, AllToAllWithoutSplitsCutsEvenly) {
  run([&](int64_t rank, const GroupPtr& group) {
    auto recv = at::empty({2 * size});
    auto send = at::arange(2 * size, at::kFloat).add_(static_cast<double>(100 * rank));
    all_to_all(*group, recv, send)->wait();
    for (int64_t peer = 0; peer < size; ++peer) {
      EXPECT_EQ(recv[2 * peer].item<float>(), static_cast<float>(100 * peer + 2 * rank));
      EXPECT_EQ(recv[2 * peer + 1].item<float>(), static_cast<float>(100 * peer + 2 * rank + 1));
    }
  });
}

TEST_P(EveryGroup, WhollyEmptyTensorsPass) {
  run([&](int64_t, const GroupPtr& group) {
    all_to_all(*group, at::empty({0, 3}), at::empty({0, 3}), Splits(static_cast<size_t>(size), 0),
               Splits(static_cast<size_t>(size), 0))
        ->wait();
    all_to_all(*group, at::empty({0}), at::empty({0}))->wait();
    all_gather(*group, at::empty({0}), at::empty({0}))->wait();
    reduce_scatter(*group, at::empty({0}), at::empty({0}))->wait();
    EXPECT_EQ(all_reduce(*group, at::empty({0})).numel(), 0);
  });
}

TEST_P(EveryGroup, AllGatherEvenAndUneven) {
  run([&](int64_t rank, const GroupPtr& group) {
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

TEST_P(EveryGroup, AllGatherIntoTheBufferThatHoldsTheInput) {
  run([&](int64_t rank, const GroupPtr& group) {
    auto recv = full({size}, -1);
    recv[rank].fill_(static_cast<double>(rank));
    all_gather(*group, recv, recv.narrow(0, rank, 1))->wait();
    EXPECT_TRUE(same(recv, at::arange(size, at::kFloat)));
  });
}

TEST_P(EveryGroup, ReductionsHaveTheirClosedForm) {
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
      run([&, op = op, value = expected](int64_t rank, const GroupPtr& group) {
        const auto mine = static_cast<double>(rank + 1);
        EXPECT_TRUE(same(all_reduce(*group, full({5}, mine, dtype), op), full({5}, value, dtype)));
        auto part = at::empty({2}, at::dtype(dtype));
        reduce_scatter(*group, part, full({2 * size}, mine, dtype), op)->wait();
        EXPECT_TRUE(same(part, full({2}, value, dtype)));
      });
    }
  }
}

TEST_P(EveryGroup, ReduceScatterGivesEachRankItsPart) {
  run([&](int64_t rank, const GroupPtr& group) {
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

TEST_P(EveryGroup, ReduceReachesTheRootAlone) {
  run([&](int64_t rank, const GroupPtr& group) {
    c10d::ReduceOptions options;
    options.rootRank = size - 1;
    options.reduceOp = ReduceOp::MAX;
    Tensors tensors{full({3}, static_cast<double>(size - rank))};
    group->reduce(tensors, options)->wait();
    EXPECT_TRUE(same(tensors[0], full({3}, static_cast<double>(rank == size - 1 ? size : size - rank))));
  });
}

TEST_P(EveryGroup, BitsAndUnsignedNumbersReduce) {
  run([&](int64_t rank, const GroupPtr& group) {
    const auto bit = static_cast<double>(1 << rank), all = static_cast<double>((1 << size) - 1);
    EXPECT_TRUE(same(all_reduce(*group, full({2}, bit, at::kInt), ReduceOp::BOR), full({2}, all, at::kInt)));
    EXPECT_TRUE(same(all_reduce(*group, full({2}, bit, at::kByte), ReduceOp::BXOR), full({2}, all, at::kByte)));
    EXPECT_TRUE(same(all_reduce(*group, full({2}, all - bit, at::kLong), ReduceOp::BAND), full({2}, 0, at::kLong)));
    const bool last = rank == size - 1;
    EXPECT_TRUE(all_reduce(*group, full({1}, last, at::kBool)).item<bool>());
    EXPECT_EQ(all_reduce(*group, full({1}, last, at::kBool), ReduceOp::MIN).item<bool>(), size == 1);
    // 65000 * size, modulo 2^16
    const auto sum = all_reduce(*group, at::full({1}, 65000, at::dtype(at::kUInt16)));
    EXPECT_EQ(sum.to(at::kLong).item<int64_t>(), 65000 * size % 65536);
  });
}

TEST_P(EveryGroup, EveryDtypeMovesAndSums) {
  for (const auto dtype : {at::kBool, at::kByte, at::kShort, at::kUInt32, at::kUInt64, at::kHalf, at::kBFloat16,
                           at::kFloat8_e4m3fn, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble}) {
    run([&](int64_t rank, const GroupPtr& group) {
      const auto bytes = [](const at::Tensor& x) { return x.contiguous().view(at::kByte); };
      const auto one = at::ones({3}, at::kFloat).to(dtype), mine = rank % 2 == 0 ? one : at::zeros({3}, dtype);
      auto gathered = at::zeros({3 * size}, dtype);
      all_gather(*group, gathered, mine)->wait();
      for (int64_t peer = 0; peer < size; ++peer) {
        const auto expected = peer % 2 == 0 ? one : at::zeros({3}, dtype);
        EXPECT_TRUE(at::equal(bytes(gathered.narrow(0, 3 * peer, 3)), bytes(expected))) << dtype;
      }
      const auto sum = all_reduce(*group, mine.clone());
      EXPECT_TRUE(at::equal(bytes(sum), bytes(full({3}, static_cast<double>((size + 1) / 2)).to(dtype)))) << dtype;
    });
  }
}

// Every other column of memory that is twice as wide, and what lies between them must stay.
struct EveryOther {
  explicit EveryOther(const at::Tensor& values) : memory(at::full({values.size(0), 2 * values.size(1)}, -5.0)) {
    columns().copy_(values);
  }
  at::Tensor columns() const { return memory.slice(1, 0, memory.size(1), 2); }
  bool holds(const at::Tensor& values) const { return at::equal(columns(), values) && gaps_stay(); }
  bool gaps_stay() const { return memory.slice(1, 1, memory.size(1), 2).eq(-5.0).all().item<bool>(); }
  at::Tensor memory;
};

TEST_P(EveryGroup, TensorsThatAreNotContiguous) {
  run([&](int64_t rank, const GroupPtr& group) {
    const auto mine = static_cast<double>(rank + 1), sum = static_cast<double>(size * (size + 1) / 2);
    EveryOther reduced(full({2, 3}, mine));
    all_reduce(*group, reduced.columns());
    EXPECT_TRUE(reduced.holds(full({2, 3}, sum)));
    EveryOther from(full({size, 3}, mine)), to(full({size, 3}, 0));
    all_to_all(*group, to.columns(), from.columns())->wait();
    EXPECT_TRUE(to.holds(at::arange(1, size + 1, at::kFloat).unsqueeze(1).expand({size, 3})));
    EveryOther part(full({1, 3}, 0));
    reduce_scatter(*group, part.columns(), from.columns())->wait();
    EXPECT_TRUE(part.holds(full({1, 3}, sum)));
    EveryOther said(full({2, 3}, mine));
    Tensors tensors{said.columns()};
    group->broadcast(tensors)->wait();
    EXPECT_TRUE(said.holds(full({2, 3}, 1)));
    const auto conjugate = at::complex(full({1}, 1), full({1}, mine)).conj();  // its memory is not its values
    auto gathered = at::empty({size}, at::kComplexFloat);
    all_gather(*group, gathered, conjugate)->wait();
    EXPECT_TRUE(at::equal(at::imag(gathered), -at::arange(1, size + 1, at::kFloat)));
  });
}

TEST_P(EveryGroup, CoalescedCallsAreOneAfterTheOther) {
  run([&](int64_t rank, const GroupPtr& group) {
    const auto backend = group->getBackend(c10::DeviceType::CPU);
    Tensors parts{full({1}, static_cast<double>(rank)), full({2}, static_cast<double>(rank + 10))};
    Tensors wholes{at::empty({size}), at::empty({2 * size})};
    backend->allgather_into_tensor_coalesced(wholes, parts, {})->wait();
    EXPECT_EQ(wholes[0][size - 1].item<float>(), static_cast<float>(size - 1));
    EXPECT_EQ(wholes[1][2 * size - 1].item<float>(), static_cast<float>(size + 9));
    backend->reduce_scatter_tensor_coalesced(parts, wholes, {})->wait();
    EXPECT_TRUE(same(parts[1], full({2}, static_cast<double>(size * (rank + 10)))));
    backend->allreduce_coalesced(parts, {})->wait();
    EXPECT_EQ(parts[0].item<float>(), static_cast<float>(size * size * (size - 1) / 2));
    Tensors fewer{parts[0]};
    EXPECT_TRUE(contains(error_of([&] { backend->allgather_into_tensor_coalesced(wholes, fewer, {}); }),
                         "rank 0: 2 outputs, expected 1"));
  });
}

TEST_P(EveryTransport, SumsInRankOrderOnEveryRank) {
  const std::vector<double> values = {1e8, 1, -1e8, 1};  // in float32 and in this order: 1; from the right: 0 or 2
  run_ranks_over(GetParam(), 4, [&](int64_t rank, const GroupPtr& group) {
    EXPECT_EQ(all_reduce(*group, full({1}, values[static_cast<size_t>(rank)])).item<float>(), 1.0F);
  });
}

TEST_P(EveryTransport, SumsSixteenBitFloatsInFloat32) {
  // 256 + 1 is not a bfloat16: rounded at each step the sum would stay 256.
  run_ranks_over(GetParam(), 7, [&](int64_t rank, const GroupPtr& group) {
    const auto sum = all_reduce(*group, full({1}, rank == 0 ? 256 : 1, at::kBFloat16));
    EXPECT_EQ(sum.item<float>(), 262.0F);
  });
}

TEST_P(EveryGroup, BroadcastGatherScatterFromTheLastRank) {
  run([&](int64_t rank, const GroupPtr& group) {
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

TEST_P(EveryGroup, SendRecvRing) {
  run([&](int64_t rank, const GroupPtr& group) {
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

TEST_P(EveryTransport, WorksHaveResultsAndFutures) {
  run_ranks_over(GetParam(), 2, [&](int64_t rank, const GroupPtr& group) {
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

TEST_P(EveryTransport, ManyCollectivesWithRanksThatDrift) {
  run_ranks_over(GetParam(), 4, [&](int64_t rank, const GroupPtr& group) {
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

TEST_P(EveryGroup, BackwardRunsCollectivesOnTheRankThreads) {
  run([&](int64_t rank, const GroupPtr& group) {
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
