#include "ulysses/exchange/group.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "collectives.h"
#include "ulysses/transports/recording/recording_group.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::exchange {
namespace {

using namespace ulysses::testing;
using transports::Recorder;
using transports::run_ranks;
using transports::ThreadWorld;

class EveryGroupSize : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryGroupSize, ::testing::Values(1, 2, 4, 7));

at::Tensor full(int64_t count, int64_t value) { return at::full({count}, static_cast<double>(value)); }

TEST_P(EveryGroupSize, RowsToRanksWithEmptyBlocks) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& process_group) {
    const Group group(process_group);
    Tensors sent, expected;
    std::vector<int64_t> send_counts, recv_counts;
    for (int64_t peer = 0; peer < size; ++peer) {
      send_counts.push_back((rank + 2 * peer) % 3);
      recv_counts.push_back((peer + 2 * rank) % 3);
      sent.push_back(full(send_counts.back(), 10 * rank + peer));
      expected.push_back(full(recv_counts.back(), 10 * peer + rank));
    }
    auto recv = at::empty_like(at::cat(expected));
    group.rows_to_ranks(recv, at::cat(sent), recv_counts, send_counts);
    EXPECT_TRUE(at::equal(recv, at::cat(expected)));
  });
}

TEST_P(EveryGroupSize, GatherRowsOfUnevenAndEmptyShardsInOneCollective) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& process_group) {
    const auto recorder = std::make_shared<Recorder>();
    const Group group(transports::record_group(process_group, recorder));
    Tensors expected;
    std::vector<int64_t> counts;
    for (int64_t peer = 0; peer < size; ++peer) {
      counts.push_back(peer % 3);  // rank 0 has nothing
      expected.push_back(full(counts.back(), peer + 1));
    }
    auto recv = at::empty_like(at::cat(expected));
    group.gather_rows(recv, full(rank % 3, rank + 1), counts);
    EXPECT_TRUE(at::equal(recv, at::cat(expected)));
    const auto records = recorder->records();
    ASSERT_EQ(records.size(), size == 1 ? 0U : 1U);
    for (const auto& record : records) EXPECT_EQ(record.bytes_sent, 4 * (rank % 3) * (size - 1));
  });
}

TEST_P(EveryGroupSize, GatherNumbersAndTexts) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& process_group) {
    const Group group(process_group);
    const auto numbers = group.gather_numbers({rank, -rank, int64_t{1} << 40});
    const auto texts = group.gather_texts(std::string(static_cast<size_t>(rank), 'x') + (rank == 1 ? "\0é" : ""));
    ASSERT_EQ(static_cast<int64_t>(numbers.size()), size);
    ASSERT_EQ(static_cast<int64_t>(texts.size()), size);
    for (int64_t peer = 0; peer < size; ++peer) {
      EXPECT_EQ(numbers[static_cast<size_t>(peer)], (std::vector<int64_t>{peer, -peer, int64_t{1} << 40}));
      EXPECT_EQ(texts[static_cast<size_t>(peer)],
                std::string(static_cast<size_t>(peer), 'x') + (peer == 1 ? "\0é" : ""));
    }
    for (const auto& text : group.gather_texts("")) EXPECT_TRUE(text.empty());
    for (const auto& none : group.gather_numbers({})) EXPECT_TRUE(none.empty());
  });
}

// A thread rank under Gloo's name and with Gloo's rule: no outputs of different sizes in the list form.
class GlooLikeBackend final : public c10d::Backend {
 public:
  explicit GlooLikeBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "gloo"; }
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions& options) override {
    for (const auto& input : inputs) EXPECT_FALSE(input.requires_grad());
    for (const auto& output : outputs) TORCH_CHECK(output.numel() == outputs[0].numel(), "invalid tensor size");
    return inner_->alltoall(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                               Splits& input_splits, const c10d::AllToAllOptions& options) override {
    EXPECT_FALSE(input.requires_grad());
    return inner_->alltoall_base(output, input, output_splits, input_splits, options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
};

GroupPtr gloo_like(const GroupPtr& inner) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(inner->getRank(), inner->getSize());
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<GlooLikeBackend>(inner->getBackend(c10::DeviceType::CPU));
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  return group;
}

TEST(Group, TensorsThatRequireGradAreHandedOverWithoutIt) {
  run_ranks(2, [&](int64_t rank, const GroupPtr& process_group) {
    const Group group(gloo_like(process_group));  // it looks at what it is handed
    const auto send = full(2, rank).requires_grad_();
    auto recv = at::empty({2});
    group.rows_to_ranks(recv, send, {1, 1}, {1, 1});
    EXPECT_EQ(recv[1].item<float>(), 1.0F);
    EXPECT_FALSE(recv.requires_grad());
    auto all = at::empty({4});
    group.gather_rows(all, send, {2, 2});
    EXPECT_EQ(all[3].item<float>(), 1.0F);
    EXPECT_FALSE(all.requires_grad());
  });
}

TEST(Group, KnowsItselfAndIsResolvedByName) {
  const ThreadWorld world(3);
  const Group group = Group::resolve(world.group(2)->getGroupName());
  EXPECT_EQ(group.rank(), 2);
  EXPECT_EQ(group.size(), 3);
  EXPECT_EQ(group.name(), world.group(2)->getGroupName());
  EXPECT_TRUE(group.agreement_is_free());
  const auto text = error_of([] { Group::resolve("no such group"); }, "CP063");
  EXPECT_TRUE(contains(text, "no process group is registered as \"no such group\"")) << text;
  EXPECT_FALSE(error_of([] { Group null_group{GroupPtr()}; }, "CP063").empty());
}

// A backend that fails as torch's own do.
class BrokenBackend final : public c10d::Backend {
 public:
  BrokenBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "broken"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(false, "connection reset");
  }
};

TEST(Group, FailuresOfTorchAreWrappedAndSayThatTheGroupIsLost) {
  auto process_group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  const c10::intrusive_ptr<c10d::Backend> backend = c10::make_intrusive<BrokenBackend>();
  process_group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  const Group group(process_group);
  EXPECT_FALSE(group.agreement_is_free());
  const auto text = error_of([&] { group.gather_numbers({1}); });
  EXPECT_TRUE(contains(text, "[gather_numbers] torch.distributed failed in gather_numbers: connection reset")) << text;
  EXPECT_TRUE(contains(text, "no longer usable")) << text;
}

TEST(Group, GatherRowsWhereListsMustBeEven) {
  run_ranks(3, [&](int64_t rank, const GroupPtr& inner) {
    const Group group(gloo_like(inner));
    EXPECT_FALSE(group.agreement_is_free());
    for (const std::vector<int64_t>& counts : {Splits{2, 2, 2}, Splits{0, 2, 3}, Splits{0, 0, 0}, Splits{5, 0, 0}}) {
      const Tensors expected = {full(counts[0], 1), full(counts[1], 2), full(counts[2], 3)};
      auto recv = at::empty({counts[0] + counts[1] + counts[2]});
      group.gather_rows(recv, full(counts[static_cast<size_t>(rank)], rank + 1), counts);
      EXPECT_TRUE(at::equal(recv, at::cat(expected)));
    }
  });
}

TEST(Group, OurOwnErrorsPassUnchanged) {
  run_ranks(2, [&](int64_t rank, const GroupPtr& process_group) {
    const Group group(process_group);
    auto recv = at::empty({2});
    const auto text = error_of([&] {
      group.rows_to_ranks(recv, full(2 + rank, 0), {1, 1}, rank == 0 ? Splits{1, 1} : Splits{2, 1});
    });
    EXPECT_TRUE(contains(text, "rank 1 sends 8 bytes to rank 0, which expects 4 bytes")) << text;
    EXPECT_TRUE(contains(text, "still usable")) << text;
    EXPECT_EQ(group.gather_numbers({rank})[1][0], 1);
  });
}

TEST(Group, LocalRowsThatDontMatchTheCountsNeverReachTheTransport) {
  run_ranks(2, [&](int64_t, const GroupPtr& process_group) {
    const Group group(process_group);
    auto recv = at::empty({4});
    const auto text = error_of([&] { group.gather_rows(recv, full(3, 0), {2, 2}); });
    EXPECT_TRUE(contains(text, "local has 3 elements, counts [2, 2]")) << text;
  });
}

}  // namespace
}  // namespace ulysses::exchange
