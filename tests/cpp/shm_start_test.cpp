#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "own_groups.h"
#include "ulysses/base/text.h"
#include "ulysses/transports/shm/process_life.h"
#include "ulysses/transports/shm/segment.h"
#include "ulysses/transports/shm/shm_join.h"
#include "ulysses/transports/shm/shm_meeting.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kShort{200};

// Keeps what was set, also after a key is deleted.
struct RememberingStore final : c10d::HashStore {
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      values.emplace_back(value.begin(), value.end());
    }
    c10d::HashStore::set(key, value);
  }
  std::mutex mutex;
  std::vector<std::string> values;
};

bool exists(const std::string& name) { return std::filesystem::exists("/dev/shm" + name); }
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

TEST(ShmStart, TheNameIsGoneWhenEveryRankHasTheSegment) {
  const auto store = c10::make_intrusive<RememberingStore>();
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = make_shm_group(store, rank, 3);
      all_reduce(*group, at::ones({1}));
      EXPECT_FALSE(exists(first_line(store->values.at(0))));
      EXPECT_FALSE(rank == 0 && store->check({"ulysses_shm"}));
      all_reduce(*group, at::ones({1}));
    });
  }
  for (auto& thread : threads) thread.join();
  ASSERT_EQ(store->values.size(), 1U);
  EXPECT_TRUE(store->values[0].starts_with("/ulysses-"));
}

TEST(ShmStart, ARankThatNeverOpensTheSegmentIsNamedAndTheNameIsGone) {
  const auto store = c10::make_intrusive<RememberingStore>();
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  for (int64_t rank : {0, 2}) {
    threads.emplace_back([&, rank] {
      texts[static_cast<size_t>(rank)] = error_of([&] { make_shm_group(store, rank, 3, milliseconds(1500)); });
    });
  }
  for (auto& thread : threads) thread.join();
  for (const size_t rank : {0, 2}) {
    EXPECT_TRUE(contains(texts[rank], "waited 1500 ms in start for rank 1, which never came (rank 1: it never opened "))
        << texts[rank];
  }
  EXPECT_FALSE(exists(first_line(store->values.at(0))));
}

TEST(ShmStart, WhatRankZeroMeetsTheOthersHear) {
  const auto with_key = [](const std::string& text) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    store->set("ulysses_shm", std::vector<uint8_t>(text.begin(), text.end()));
    return error_of([&] { join_shm(store, 1, 2, kShort); });
  };
  EXPECT_TRUE(contains(with_key("failed\nno room"), "rank 0 could not make the segment: no room"));
  EXPECT_TRUE(contains(with_key("/ulysses-1\nanother host"), "this rank and rank 0 run on different hosts"));
  EXPECT_TRUE(contains(with_key("/ulysses-none\n" + host_id()),
                       "the segment of rank 0, /ulysses-none, is not in this process's /dev/shm"));
  Segment other = Segment::create(ShmLayout(nullptr, 2).bytes());
  EXPECT_TRUE(contains(with_key(other.name() + '\n' + host_id()), "another version of this library"));
  const auto none = c10::make_intrusive<c10d::HashStore>();
  EXPECT_TRUE(contains(error_of([&] { join_shm(none, 1, 2, kShort); }), "rank 0 named no segment within 200 ms"));
}

TEST(ShmStart, ANameThatAnEarlierGroupLeftInTheStoreIsNotTakenForThisOne) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string stale = "/ulysses-gone\n" + host_id();
  store->set("ulysses_shm", std::vector<uint8_t>(stale.begin(), stale.end()));
  std::thread late([&] { EXPECT_EQ(join_shm(store, 1, 2, seconds(20))->meeting().rank(), 1); });
  std::this_thread::sleep_for(milliseconds(100));
  join_shm(store, 0, 2, seconds(20));
  late.join();
}

TEST(ShmStart, BadArgumentsAreRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_TRUE(
      contains(error_of([&] { join_shm(store, 0, 257, kShort); }, "CP006"), "world_size=257 is not in 1 to 256"));
  EXPECT_TRUE(contains(error_of([&] { join_shm(store, 2, 2, kShort); }), "rank=2 of 2 ranks"));
  EXPECT_TRUE(contains(error_of([&] { join_shm(store, 0, 2, milliseconds(0)); }), "timeout=0 ms is not positive"));
}

TEST(ShmStart, AFullFileSystemIsAnErrorWithNumbers) {
  const auto text = error_of([] { Segment::create(int64_t{1} << 50); });
  EXPECT_TRUE(contains(text, "the group needs 1125899906842624 bytes (1073741824 MiB) of /dev/shm, where ")) << text;
  EXPECT_TRUE(contains(text, " MiB are free. Fix: free at least 107")) << text;
}

TEST(ShmStart, ASegmentIsReadableByThisUserAlone) {
  const Segment segment = Segment::create(4096);
  ASSERT_TRUE(exists(segment.name()));
  using std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status("/dev/shm" + segment.name()).permissions(), perms::owner_read | perms::owner_write);
  EXPECT_GE(segment.name().size(), 32U);
}

// A process that does nothing until it is killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    while (pid_ == 0) ::pause();
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  ProcessId id() const { return process(pid_); }
  void signal(int number) const { ::kill(pid_, number); }
  void await(int state) const {  // without taking its end note away
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, state | WNOWAIT);
  }
  void end() {
    if (pid_ <= 0) return;
    signal(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

TEST(ProcessLife, AProcessRunsIsStoppedAndEndsAlsoBeforeAnybodyHasWaitedForIt) {
  Child child;
  const ProcessId id = child.id();
  EXPECT_EQ(life_of(id), Life::kRunning);
  child.signal(SIGSTOP);
  child.await(WSTOPPED);
  EXPECT_EQ(life_of(id), Life::kStopped);
  child.signal(SIGKILL);
  child.await(WEXITED);
  EXPECT_EQ(life_of(id), Life::kEnded);
  child.end();
  EXPECT_EQ(life_of(id), Life::kEnded);
}

TEST(ProcessLife, ANumberThatAnotherProcessHasNowIsNotTheSame) {
  ProcessId id = own_process();
  EXPECT_EQ(life_of(id), Life::kRunning);
  --id.start;
  EXPECT_EQ(life_of(id), Life::kEnded);
  id = own_process();
  ++id.pid_namespace;
  EXPECT_EQ(life_of(id), Life::kUnknown);
}

// A group of two in plain memory, of which the second rank is what a test makes of it.
class TwoRanks : public ::testing::Test {
 protected:
  TwoRanks() : memory(static_cast<size_t>(ShmLayout(nullptr, 2).bytes()) + 4096) {
    void* begin = memory.data();
    size_t space = memory.size();
    layout = ShmLayout(static_cast<std::byte*>(std::align(4096, memory.size() - 4096, begin, space)), 2);
    layout.make();
  }
  void let_rank_1_be(const ProcessId& id) {
    RankRecord& record = layout.record(1);
    record.pid_namespace.store(id.pid_namespace);
    record.start.store(id.start);
    record.pid.store(static_cast<uint64_t>(id.pid));
    record.op.store(number_of_op("broadcast"));
    record.calls.store(12);
  }
  std::vector<std::byte> memory;
  ShmLayout layout{nullptr, 2};
};

TEST_F(TwoRanks, AProcessThatEndsIsNamedLongBeforeTheTimeout) {
  Child child;
  let_rank_1_be(child.id());
  ShmMeeting meeting(layout, 0);
  std::thread killing([&] {
    std::this_thread::sleep_for(milliseconds(50));
    child.signal(SIGKILL);  // and nobody waits for it
  });
  const auto start = Clock::now();
  const auto text = error_of([&] { meeting.meet("all_gather", seconds(300)); });
  EXPECT_LT(Clock::now() - start, seconds(60));
  killing.join();
  EXPECT_TRUE(contains(text, base::cat("rank 0 waits in all_gather for rank 1, whose process ", child.id().pid)))
      << text;
  EXPECT_TRUE(contains(text, " ended; its last call was broadcast, number 12 of this group")) << text;
  EXPECT_EQ(error_of([&] { meeting.begin_call("all_gather"); }), text);
}

TEST_F(TwoRanks, AStoppedProcessIsNamedAtTheTimeout) {
  Child child;
  child.signal(SIGSTOP);
  child.await(WSTOPPED);
  let_rank_1_be(child.id());
  ShmMeeting meeting(layout, 0);
  const auto text = error_of([&] { meeting.meet("all_gather", kShort); });
  EXPECT_TRUE(contains(text, "rank 0 waited 200 ms in all_gather for rank 1, which never came (rank 1: process "))
      << text;
  EXPECT_TRUE(contains(text, " is stopped; its last call was broadcast")) << text;
}

TEST_F(TwoRanks, ARankThatCameAndWasKilledBeforeItCouldSayThatAllHaveIsNoLoss) {
  Child child;
  let_rank_1_be(child.id());
  ShmMeeting meeting(layout, 0);
  std::thread coming([&] {
    std::this_thread::sleep_for(milliseconds(50));  // rank 0 sleeps by then
    layout.record(1).arrived.store(1);
    child.end();
  });
  EXPECT_EQ(error_of([&] { meeting.meet("all_gather", seconds(300)); }), "");
  coming.join();
  EXPECT_TRUE(contains(error_of([&] { meeting.meet("barrier", seconds(300)); }), "rank 1, whose process"));
}

TEST_F(TwoRanks, ARankThatGaveUpAndWasKilledBeforeItCouldSayWhyIsNoHang) {
  ShmMeeting meeting(layout, 0);
  layout.head().state.word.store(1);  // dead, and the words of nobody
  const auto text = error_of([&] { meeting.begin_call("barrier"); });
  EXPECT_TRUE(contains(text, "a rank gave the group up and ended before it could say why")) << text;
}

TEST_F(TwoRanks, AnIdleWaitTakesNoTimeOfACore) {
  let_rank_1_be(own_process());
  ShmMeeting meeting(layout, 0);
  const std::clock_t before = std::clock();  // of this process, all threads
  EXPECT_NE(error_of([&] { meeting.meet("barrier", milliseconds(1000)); }), "");
  EXPECT_LT(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC, 0.25);
}

}  // namespace
}  // namespace ulysses::transports
