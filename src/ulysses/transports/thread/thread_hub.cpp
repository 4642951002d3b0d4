#include "ulysses/transports/thread/thread_hub.h"

#include <sched.h>

#include <cstring>
#include <exception>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kDead = 1u << 16;  // below: ranks that have arrived; above: the generation
constexpr uint64_t kCountMask = kDead - 1;
constexpr uint64_t kNextGeneration = kDead << 1;
constexpr int kPauses = 200;
constexpr int kYieldsPerLook = 16;
constexpr std::chrono::milliseconds kSpinTime{1};  // longer waits sleep and leave the cores to ranks that compute

constexpr std::string_view kUsable = "Nothing was exchanged and the group is still usable";
constexpr std::string_view kUnusable = "The group is no longer usable";

uint64_t generation_of(uint64_t state) { return state / kNextGeneration; }
uint64_t count_of(uint64_t state) { return state & kCountMask; }
bool is_dead(uint64_t state) { return (state & kDead) != 0; }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  ::sched_yield();
#endif
}

[[noreturn]] void raise(std::string what, std::string_view rule, std::string fix, std::string_view op, int64_t rank,
                        int64_t size) {
  throw base::Error({{"CP062", base::ErrorKind::kCommunication, std::move(what), std::string(rule), std::move(fix)}},
                    op, rank, size);
}

std::string name_ranks(const std::vector<int64_t>& ranks) {
  return base::cat(ranks.size() == 1 ? "rank " : "ranks ", base::join(ranks));
}

// "rank 0 calls all_reduce, rank 1 calls all_gather" if the values differ, else empty.
template <typename Value, typename Text>
std::string find_difference(const std::vector<Contribution>& ranks, std::string_view verb, Value value, Text text) {
  bool differ = false;
  for (const auto& rank : ranks) differ = differ || value(rank) != value(ranks.front());
  if (!differ) return {};
  std::vector<std::string> parts;
  for (size_t r = 0; r < ranks.size(); ++r) parts.push_back(base::cat("rank ", r, ' ', verb, ' ', text(ranks[r])));
  return base::join(parts);
}

std::string find_refusals(const std::vector<Contribution>& ranks) {
  std::vector<std::string> parts;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (!ranks[r].problem.empty()) parts.push_back(base::cat("rank ", r, ": ", ranks[r].problem));
  }
  return base::join(parts, "; ");
}

std::string find_size_mismatch(const std::vector<Contribution>& ranks) {
  std::vector<std::string> parts;
  for (size_t source = 0; source < ranks.size(); ++source) {
    for (size_t destination = 0; destination < ranks.size(); ++destination) {
      const int64_t sent = ranks[source].send[destination].bytes;
      const int64_t expected = ranks[destination].receive[source].bytes;
      if (sent == expected) continue;
      parts.push_back(base::cat("rank ", source, " sends ", sent, " bytes to rank ", destination, ", which expects ",
                                expected, " bytes"));
    }
  }
  return base::join(parts, "; ");
}

}  // namespace

std::string find_disagreement(const std::vector<Contribution>& ranks) {
  std::string text = find_difference(
      ranks, "calls", [](const auto& c) { return c.op; }, [](const auto& c) { return c.op; });
  if (text.empty()) text = find_refusals(ranks);
  if (text.empty()) {
    text = find_difference(
        ranks, "has", [](const auto& c) { return c.dtype; },
        [](const auto& c) { return base::cat("dtype ", c10::toString(c.dtype)); });
  }
  if (text.empty()) {
    text = find_difference(
        ranks, "names root", [](const auto& c) { return c.root; }, [](const auto& c) { return c.root; });
  }
  if (text.empty()) {
    text = find_difference(
        ranks, "reduces with op", [](const auto& c) { return c.reduce_op; }, [](const auto& c) { return c.reduce_op; });
  }
  if (text.empty()) text = find_size_mismatch(ranks);
  return text;
}

ThreadHub::ThreadHub(int64_t size, std::chrono::milliseconds timeout)
    : size_(size), timeout_(timeout), contributions_(static_cast<size_t>(size)), arrivals_(static_cast<size_t>(size)) {}

Contribution& ThreadHub::begin(int64_t rank, std::string_view op) {
  if (is_dead(state_.load())) raise_dead(rank, op);
  Contribution& own = contributions_[static_cast<size_t>(rank)];
  own.op = op;
  own.problem.clear();
  own.dtype = at::ScalarType::Undefined;
  own.root = own.reduce_op = -1;
  own.send.assign(static_cast<size_t>(size_), {});
  own.receive.assign(static_cast<size_t>(size_), {});
  own.keep_alive.clear();
  return own;
}

void ThreadHub::exchange(int64_t rank, std::chrono::milliseconds timeout, const std::function<void()>& combine) {
  Contribution& own = contributions_[static_cast<size_t>(rank)];
  arrive(rank, Phase::kEnter, timeout);
  // From here every rank reads the others' memory. Whatever happens, all must leave together.
  std::exception_ptr failure;
  std::string disagreement;
  try {
    disagreement = find_disagreement(contributions_);
    if (disagreement.empty()) {
      for (int64_t step = 0; step < size_; ++step) {
        const auto source = static_cast<size_t>((rank + step) % size_);
        const auto& from = contributions_[source].send[static_cast<size_t>(rank)];
        const auto& to = own.receive[source];
        if (to.data == nullptr || to.bytes == 0 || to.data == from.data) continue;
        std::memcpy(to.data, from.data, static_cast<size_t>(to.bytes));
      }
      if (combine) combine();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  arrive(rank, Phase::kLeave, timeout);
  own.keep_alive.clear();
  if (failure) std::rethrow_exception(failure);
  if (!disagreement.empty()) {
    raise(disagreement, kUsable, "make every rank call the same collective with matching tensors", own.op, rank, size_);
  }
}

bool ThreadHub::met(uint64_t generation, Phase phase) const {
  const uint64_t now = state_.load();
  // A rank that leaves waits for its readers even in a dead world: they are all inside and none of them waits.
  return generation_of(now) != generation || (phase == Phase::kEnter && is_dead(now));
}

bool ThreadHub::spin(uint64_t generation, Phase phase) const {
  for (int i = 0; i < kPauses; ++i) {
    if (met(generation, phase)) return true;
    pause();
  }
  const auto end = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kYieldsPerLook; ++i) {
      if (met(generation, phase)) return true;
      ::sched_yield();
    }
  } while (Clock::now() < end);
  return false;
}

void ThreadHub::arrive(int64_t rank, Phase phase, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  arrivals_[static_cast<size_t>(rank)].count.fetch_add(1);
  uint64_t state = state_.fetch_add(1) + 1;
  const uint64_t generation = generation_of(state);
  if (count_of(state) == static_cast<uint64_t>(size_)) {
    while (phase == Phase::kLeave || !is_dead(state)) {
      if (!state_.compare_exchange_weak(state, state - count_of(state) + kNextGeneration)) continue;
      if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);  // a sleeper is either before its look at the state or asleep
        wake_.notify_all();
      }
      return;
    }
  }
  if (!spin(generation, phase)) {
    sleepers_.fetch_add(1);
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait_until(lock, deadline, [&] { return met(generation, phase); });
    lock.unlock();
    sleepers_.fetch_sub(1);
    if (!met(generation, phase)) give_up(rank, generation, timeout);
  }
  if (generation_of(state_.load()) == generation) raise_dead(rank, contribution(rank).op);
}

void ThreadHub::give_up(int64_t rank, uint64_t generation, std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto absent = absent_ranks(rank);
  const auto op = contribution(rank).op;
  uint64_t state = state_.load();
  while (generation_of(state) == generation && !is_dead(state)) {
    if (!state_.compare_exchange_weak(state, state | kDead)) continue;
    kill(base::cat("rank ", rank, " waited ", timeout.count(), " ms in ", op, " for ", name_ranks(absent),
                   ", which never came"),
         base::cat("find why ", name_ranks(absent), " did not call ", op, ", or use a timeout above ", timeout.count(),
                   " ms; then start a new world"));
  }
}

void ThreadHub::kill(const std::string& reason, const std::string& fix) {
  state_.fetch_or(kDead);
  if (death_.empty()) {
    death_ = reason;
    death_fix_ = fix;
  }
  wake_.notify_all();
}

void ThreadHub::abort(int64_t rank, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  kill(base::cat("rank ", rank, " failed: ", reason),
       base::cat("repair the failure of rank ", rank, " and start a new world"));
}

std::vector<int64_t> ThreadHub::absent_ranks(int64_t rank) const {
  std::vector<int64_t> absent;
  const uint64_t here = arrivals_[static_cast<size_t>(rank)].count.load();
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (arrivals_[static_cast<size_t>(peer)].count.load() < here) absent.push_back(peer);
  }
  return absent;
}

void ThreadHub::raise_dead(int64_t rank, std::string_view op) const {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto reason = death_, fix = death_fix_;
  lock.unlock();
  raise(reason, kUnusable, fix, op, rank, size_);
}

void ThreadHub::post(const Address& address, at::Tensor message) {
  if (is_dead(state_.load())) raise_dead(address.source, "send");
  std::lock_guard<std::mutex> lock(mutex_);
  Mailbox& box = mail_[address.key()];
  box.messages.emplace(box.posted++, std::move(message));
  wake_.notify_all();
}

uint64_t ThreadHub::expect(const Address& address) {
  std::lock_guard<std::mutex> lock(mutex_);
  return mail_[address.key()].expected++;
}

bool ThreadHub::has_message(const Address& address, uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return mail_[address.key()].messages.count(ticket) > 0;
}

at::Tensor ThreadHub::take(const Address& address, uint64_t ticket, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  Mailbox& box = mail_[address.key()];
  const auto come = [&] { return box.messages.count(ticket) > 0; };
  if (!wake_.wait_until(lock, deadline, [&] { return come() || is_dead(state_.load()); })) {
    kill(base::cat("rank ", address.destination, " waited ", timeout.count(), " ms in recv for rank ", address.source,
                   " (tag ", address.tag, "), which never sent"),
         base::cat("find why rank ", address.source, " did not send, or use a timeout above ", timeout.count(),
                   " ms; then start a new world"));
  }
  if (!come()) {
    lock.unlock();
    raise_dead(address.destination, "recv");
  }
  at::Tensor message = std::move(box.messages.at(ticket));
  box.messages.erase(ticket);
  return message;
}

}  // namespace ulysses::transports
