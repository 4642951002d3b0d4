#include "ulysses/transports/recording/recording_group.h"

#include <gtest/gtest.h>

#include <array>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "collectives.h"
#include "ulysses/exchange/group.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;

class RecordedWorld : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RecordedWorld, ::testing::Values(1, 2, 4, 7));

// Records what `call` does and expects one record.
template <typename Call>
void expect_one(const GroupPtr& inner, const std::string& name, int64_t bytes, Call call) {
  const auto recorder = std::make_shared<Recorder>();
  const auto group = record_group(inner, recorder);
  call(*group);
  const auto records = recorder->records();
  ASSERT_EQ(records.size(), 1U) << name;
  EXPECT_EQ(records[0].name, name);
  EXPECT_EQ(records[0].bytes_sent, bytes) << name;
}

TEST_P(RecordedWorld, BytesOfEveryCollective) {
  const int64_t size = GetParam();
  run_ranks(size, [&](int64_t rank, const GroupPtr& inner) {
    // Rank s sends s + d rows of 3 floats to rank d: to all but itself W s + W (W - 1) / 2 - 2 s rows.
    Splits send_splits, recv_splits;
    int64_t rows = 0;
    for (int64_t peer = 0; peer < size; ++peer) {
      send_splits.push_back(rank + peer);
      recv_splits.push_back(rank + peer);
      rows += rank + peer;
    }
    const int64_t uneven = 12 * (size * rank + size * (size - 1) / 2 - 2 * rank);
    expect_one(inner, "all_to_all", uneven, [&](auto& group) {
      all_to_all(group, at::empty({rows, 3}), at::ones({rows, 3}), recv_splits, send_splits)->wait();
    });
    expect_one(inner, "all_to_all", uneven, [&](auto& group) {
      Tensors inputs = at::ones({rows, 3}).split_with_sizes(send_splits);
      Tensors outputs = at::empty({rows, 3}).split_with_sizes(recv_splits);
      group.alltoall(outputs, inputs)->wait();
    });
    expect_one(inner, "all_to_all", 2 * 5 * (size - 1), [&](auto& group) {
      all_to_all(group, at::empty({5 * size}, at::kHalf), at::ones({5 * size}, at::kHalf))->wait();
    });
    expect_one(inner, "all_gather", 8 * 3 * (size - 1), [&](auto& group) {
      all_gather(group, at::empty({3 * size}, at::kLong), at::ones({3}, at::kLong))->wait();
    });
    expect_one(inner, "all_gather", 4 * (rank + 1) * (size - 1), [&](auto& group) {
      std::vector<Tensors> outputs(1);
      for (int64_t peer = 0; peer < size; ++peer) outputs[0].push_back(at::empty({peer + 1}));
      Tensors inputs{at::ones({rank + 1})};
      group.allgather(outputs, inputs)->wait();
    });
    expect_one(inner, "reduce_scatter", 4 * 3 * (size - 1),
               [&](auto& group) { reduce_scatter(group, at::empty({3}), at::ones({3 * size}))->wait(); });
    expect_one(inner, "all_reduce", 4 * 6 * (size - 1), [&](auto& group) { all_reduce(group, at::ones({6})); });
    expect_one(inner, "broadcast", rank == 0 ? 4 * 6 * (size - 1) : 0, [&](auto& group) {
      Tensors tensors{at::ones({6})};
      group.broadcast(tensors)->wait();
    });
    expect_one(inner, "gather", rank == 0 ? 0 : 4 * 2, [&](auto& group) {
      std::vector<Tensors> outputs(rank == 0 ? 1 : 0);
      for (int64_t peer = 0; rank == 0 && peer < size; ++peer) outputs[0].push_back(at::empty({2}));
      Tensors inputs{at::ones({2})};
      group.gather(outputs, inputs)->wait();
    });
    expect_one(inner, "scatter", rank == 0 ? 4 * 2 * (size - 1) : 0, [&](auto& group) {
      std::vector<Tensors> inputs(rank == 0 ? 1 : 0);
      for (int64_t peer = 0; rank == 0 && peer < size; ++peer) inputs[0].push_back(at::ones({2}));
      Tensors outputs{at::empty({2})};
      group.scatter(outputs, inputs)->wait();
    });
    expect_one(inner, "send", 4 * 9, [&](auto& group) { send(group, at::ones({9}), (rank + 1) % size)->wait(); });
    expect_one(inner, "recv", 0, [&](auto& group) { recv(group, at::ones({9}), (rank + size - 1) % size)->wait(); });
    expect_one(inner, "barrier", 0, [&](auto& group) { group.barrier()->wait(); });
  });
}

TEST(RecordingGroup, TheDataArrivesAndADoubledSendIsSeen) {
  std::array<std::shared_ptr<Recorder>, 2> recorders = {std::make_shared<Recorder>(), std::make_shared<Recorder>()};
  run_ranks(2, [&](int64_t rank, const GroupPtr& inner) {
    auto& recorder = *recorders[static_cast<size_t>(rank)];
    const auto group = record_group(inner, recorders[static_cast<size_t>(rank)]);
    const auto exchange = [&] {
      auto received = at::empty({2});
      all_to_all(*group, received, at::full({2}, static_cast<double>(rank)))->wait();
      EXPECT_EQ(received[1 - rank].item<float>(), static_cast<float>(1 - rank));
    };
    exchange();
    ASSERT_EQ(recorder.records().size(), 1U);
    exchange();
    ASSERT_EQ(recorder.records().size(), 2U);
    EXPECT_EQ(recorder.records()[0].bytes_sent + recorder.records()[1].bytes_sent, 8);
    recorder.clear();
    EXPECT_TRUE(recorder.records().empty());
  });
}

TEST(RecordingGroup, KeepsTheBackendsNameAndHasItsOwnGroupName) {
  ThreadWorld world(2);
  const auto recorder = std::make_shared<Recorder>();
  auto recorded = record_group(world.group(1), recorder);
  const auto again = record_group(world.group(1), recorder);
  const std::string name = recorded->getGroupName();
  EXPECT_NE(name, world.group(1)->getGroupName());
  EXPECT_NE(name, again->getGroupName());
  EXPECT_EQ(recorded->getRank(), 1);
  EXPECT_EQ(recorded->getSize(), 2);
  EXPECT_EQ(recorded->getBackend(c10::DeviceType::CPU)->getBackendName(), kThreadBackendName);
  EXPECT_TRUE(exchange::Group(recorded).agreement_is_free());
  EXPECT_EQ(c10d::resolve_process_group(name).get(), recorded.get());
  EXPECT_EQ(exchange::Group::resolve(name).process_group().get(), recorded.get());
  recorded.reset();
  EXPECT_THROW(c10d::resolve_process_group(name), c10::Error);
}

TEST(RecordingGroup, ErrorsOfTheInnerGroupComeThrough) {
  run_ranks(2, [&](int64_t rank, const GroupPtr& inner) {
    const auto group = record_group(inner, std::make_shared<Recorder>());
    const auto text = error_of([&] { all_reduce(*group, at::ones({rank + 1})); });
    EXPECT_TRUE(contains(text, "rank 0 sends 4 bytes to rank 1, which expects 8 bytes")) << text;
  });
}

}  // namespace
}  // namespace ulysses::transports
