#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "collectives.h"
#include "ulysses/exchange/group.h"

namespace ulysses::exchange {
namespace {

using namespace ulysses::testing;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Fails as torch's own do when a peer has gone.
class LostPeerBackend final : public c10d::Backend {
 public:
  LostPeerBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "lost"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(false, "connection reset");
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor&, at::Tensor&, Splits&, Splits&,
                                               const c10d::AllToAllOptions&) override {
    TORCH_CHECK(false, "connection reset");
  }
};

Group group_of(const StorePtr& store, int rank, int size) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  const c10::intrusive_ptr<c10d::Backend> backend = c10::make_intrusive<LostPeerBackend>(rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setGroupName("census");
  return Group(group);
}

std::string fail_in_gather(const Group& group) {
  return error_of([&] { group.gather_numbers({1}); });
}

std::string fail_in_rows(const Group& group) {
  auto recv = at::empty({3});
  return error_of([&] { group.rows_to_ranks(recv, at::empty({3}), {1, 1, 1}, {1, 1, 1}); });
}

// What each rank reads, when rank r of `size` fails by failures[r]; the ranks beyond them never fail.
std::vector<std::string> texts_of(int size, const std::vector<std::function<std::string(const Group&)>>& failures) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> texts(failures.size());
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < failures.size(); ++rank)
    ranks.emplace_back([&, rank] { texts[rank] = failures[rank](group_of(store, static_cast<int>(rank), size)); });
  for (auto& thread : ranks) thread.join();
  return texts;
}

template <typename Call>
std::chrono::duration<double> time_of(Call call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::steady_clock::now() - begin;
}

TEST(FailureCensus, ARankThatDoesNotReportIsNamed) {
  for (const std::string& text : texts_of(3, {fail_in_gather, fail_in_gather})) {
    EXPECT_TRUE(contains(text, "torch.distributed failed in gather_numbers: connection reset")) << text;
    EXPECT_TRUE(contains(text, "rank 2 has not reported: it ended, is stopped, or is not in this call")) << text;
    EXPECT_TRUE(contains(text, "no longer usable")) << text;
  }
  const auto text = texts_of(4, {fail_in_gather}).front();
  EXPECT_TRUE(contains(text, "Of the others, ranks 1, 2, 3 have not reported: they ended")) << text;
}

TEST(FailureCensus, ARankThatFailedElsewhereIsNamedWithItsOp) {
  const auto texts = texts_of(3, {fail_in_gather, fail_in_rows, fail_in_gather});
  EXPECT_TRUE(contains(texts[0], "Of the others, rank 2 failed in gather_numbers too; rank 1 failed in rows_to_ranks."))
      << texts[0];
  EXPECT_TRUE(contains(texts[1], "Of the others, ranks 0, 2 failed in gather_numbers.")) << texts[1];
}

// A store whose process has ended.
class DeadStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>&) override { throw std::runtime_error("broken pipe\nand more"); }
};

TEST(FailureCensus, ADeadStoreIsNamedAndHidesNothing) {
  const auto text = fail_in_gather(group_of(c10::make_intrusive<DeadStore>(), 1, 3));
  EXPECT_TRUE(contains(text, "connection reset")) << text;
  EXPECT_TRUE(contains(text, "The store of the group does not answer (broken pipe), so the process that keeps it"))
      << text;
  EXPECT_FALSE(contains(text, "has not reported")) << text;
}

// A store whose process is stopped: it answers nothing until it is let go.
class StoppedStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>&) override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return let_go_; });
    return false;
  }
  void let_go() {
    const std::lock_guard<std::mutex> lock(mutex_);
    let_go_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool let_go_ = false;
};

TEST(FailureCensus, AStoppedStoreIsLeftBehindWithinTwoSeconds) {
  const auto store = c10::make_intrusive<StoppedStore>();
  std::string text;
  const auto seconds = time_of([&] { text = fail_in_gather(group_of(store, 0, 2)); });
  store->let_go();
  EXPECT_LT(seconds.count(), 10.0);  // 2 s, and a busy machine
  EXPECT_TRUE(contains(text, "The store of the group does not answer, so the process that keeps it")) << text;
}

TEST(FailureCensus, AGroupWithoutAStoreSaysNothingOfOthers) {
  const auto text = fail_in_gather(group_of(StorePtr(), 0, 2));
  EXPECT_TRUE(contains(text, "connection reset (rank 0 of cp_size 2). The ranks may have")) << text;
}

}  // namespace
}  // namespace ulysses::exchange
