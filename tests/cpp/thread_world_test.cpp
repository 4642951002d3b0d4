#include "ulysses/transports/thread/thread_world.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "collectives.h"

namespace ulysses::transports {
namespace {

using namespace ulysses::testing;

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

}  // namespace
}  // namespace ulysses::transports
