#include "ulysses/kernels/run_tasks.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ulysses::kernels {
namespace {

struct Ran {
  std::vector<int> times;
  std::set<std::thread::id> threads;
};

Ran run(int64_t tasks) {
  Ran ran{std::vector<int>(static_cast<size_t>(tasks), 0), {}};
  std::mutex mutex;
  run_tasks(tasks, [&](int64_t begin, int64_t end) {
    const std::lock_guard<std::mutex> lock(mutex);
    ran.threads.insert(std::this_thread::get_id());
    for (int64_t i = begin; i < end; ++i) ++ran.times[static_cast<size_t>(i)];
  });
  return ran;
}

class RunTasks : public testing::Test {
 protected:
  ~RunTasks() override { at::set_num_threads(before_); }
  const int before_ = at::get_num_threads();
};

TEST_F(RunTasks, EveryTaskOnceOnAsManyThreadsAsThereAre) {
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    for (const int64_t tasks : {0, 1, 2, 10, 100000}) {
      const Ran ran = run(tasks);
      EXPECT_EQ(ran.times, std::vector<int>(static_cast<size_t>(tasks), 1));
      EXPECT_EQ(ran.threads.size(), static_cast<size_t>(std::min<int64_t>(threads, tasks))) << tasks;
    }
  }
}

TEST_F(RunTasks, AnErrorOfATaskReachesTheCaller) {
  at::set_num_threads(3);
  EXPECT_THROW(run_tasks(9,
                         [](int64_t, int64_t end) {
                           if (end == 9) throw std::runtime_error("last");
                         }),
               std::runtime_error);
}

}  // namespace
}  // namespace ulysses::kernels
