#include "ulysses/exchange/failure_census.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "ulysses/base/text.h"

namespace ulysses::exchange {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr std::chrono::milliseconds kWaitForReports{1500};
constexpr std::chrono::milliseconds kWaitForStore{1900};
constexpr std::chrono::milliseconds kPollEvery{20};

// See Note [Two names] in group.cpp: older versions keep the store to themselves.
template <typename PG>
StorePtr store_of(const PG& group) {
  if constexpr (requires { group.getStore(); }) return group.getStore();
  return {};
}

// Shared with the thread that talks to the store: a store whose host is stopped blocks that thread for good, so the
// caller leaves it behind.
struct Census {
  std::string prefix;
  std::string op;
  int64_t rank = 0;
  int64_t size = 1;

  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, std::string> reports;  // what the others failed in
  std::string store_problem;
  bool done = false;

  std::string key(int64_t of_rank) const { return base::cat(prefix, of_rank); }
};

void read_reports(c10d::Store& store, Census& census) {
  store.set(census.key(census.rank), census.op);
  const auto deadline = Clock::now() + kWaitForReports;
  while (true) {
    size_t found = 0;
    for (int64_t peer = 0; peer < census.size; ++peer) {
      if (peer == census.rank || !store.check({census.key(peer)})) continue;
      const std::string op = store.get_to_str(census.key(peer));
      const std::lock_guard<std::mutex> lock(census.mutex);
      census.reports[peer] = op;
      ++found;
    }
    if (static_cast<int64_t>(found) + 1 == census.size || Clock::now() >= deadline) return;
    std::this_thread::sleep_for(kPollEvery);
  }
}

void take_census(const StorePtr& store, const std::shared_ptr<Census>& census) {
  std::string problem;
  try {
    read_reports(*store, *census);
  } catch (const std::exception& error) {
    problem = base::first_line(error.what());
    if (problem.empty()) problem = "no reason given";
  } catch (...) {
    problem = "no reason given";
  }
  const std::lock_guard<std::mutex> lock(census->mutex);
  census->store_problem = problem;
  census->done = true;
  census->changed.notify_all();
}

// "rank 2 has …", "ranks 0, 2 have …"
std::string named(const std::vector<int64_t>& ranks, std::string_view one, std::string_view many) {
  return base::cat(ranks.size() == 1 ? "rank " : "ranks ", base::join(ranks), ' ', ranks.size() == 1 ? one : many);
}

std::string sentence(const Census& census) {
  std::vector<int64_t> silent;
  std::map<std::string, std::vector<int64_t>> failed;
  for (int64_t peer = 0; peer < census.size; ++peer) {
    if (peer == census.rank) continue;
    const auto report = census.reports.find(peer);
    if (report == census.reports.end()) {
      silent.push_back(peer);
    } else {
      failed[report->second].push_back(peer);
    }
  }
  std::vector<std::string> sentences;
  std::vector<std::string> parts;
  if (!census.done || !census.store_problem.empty()) {
    const std::string why = census.done ? base::cat(" (", census.store_problem, ')') : std::string();
    sentences.push_back(base::cat("The store of the group does not answer", why,
                                  ", so the process that keeps it, often rank 0's, is among the lost"));
  } else if (!silent.empty()) {
    parts.push_back(named(silent, "has not reported: it ended, is stopped, or is not in this call",
                          "have not reported: they ended, are stopped, or are not in this call"));
  }
  for (const auto& [op, ranks] : failed)
    parts.push_back(base::cat(named(ranks, "failed in ", "failed in "), op, op == census.op ? " too" : ""));
  if (!parts.empty()) sentences.push_back(base::cat("Of the others, ", base::join(parts, "; ")));
  return base::join(sentences, ". ");
}

}  // namespace

std::string failure_census(const c10d::ProcessGroup& group, std::string_view op) noexcept {
  try {
    const StorePtr store = store_of(group);
    if (store == nullptr || group.getSize() == 1) return "";
    const auto census = std::make_shared<Census>();
    census->prefix = base::cat("ulysses/failed/", group.getGroupName(), '/');
    census->op = op;
    census->rank = group.getRank();
    census->size = group.getSize();
    std::thread reader(take_census, store, census);
    std::unique_lock<std::mutex> lock(census->mutex);
    const bool done = census->changed.wait_for(lock, kWaitForStore, [&] { return census->done; });
    lock.unlock();
    if (done) {
      reader.join();
    } else {
      reader.detach();
    }
    lock.lock();
    return sentence(*census);
  } catch (...) {  // no thread, no memory: the failure itself is still reported
    return "";
  }
}

}  // namespace ulysses::exchange
