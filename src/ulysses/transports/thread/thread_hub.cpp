#include "ulysses/transports/thread/thread_hub.h"

#include <cstring>
#include <exception>
#include <utility>

#include "ulysses/base/text.h"
#include "ulysses/transports/collective/raise.h"
#include "ulysses/transports/collective/spin.h"

namespace ulysses::transports {
namespace {

constexpr uint64_t kDead = 1u << 16;  // below: ranks that have arrived; above: the generation
constexpr uint64_t kCountMask = kDead - 1;
constexpr uint64_t kNextGeneration = kDead << 1;

uint64_t generation_of(uint64_t state) { return state / kNextGeneration; }
uint64_t count_of(uint64_t state) { return state & kCountMask; }
bool is_dead(uint64_t state) { return (state & kDead) != 0; }

}  // namespace

ThreadHub::ThreadHub(int64_t size, std::chrono::milliseconds timeout)
    : size_(size), timeout_(timeout), contributions_(static_cast<size_t>(size)), arrivals_(static_cast<size_t>(size)) {}

void ThreadHub::exchange(int64_t rank, Contribution contribution, std::chrono::milliseconds timeout,
                         const std::function<void()>& combine) {
  if (is_dead(state_.load())) raise_dead(rank, contribution.op);
  Contribution& own = contributions_[static_cast<size_t>(rank)];
  own = std::move(contribution);
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
      combine();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  arrive(rank, Phase::kLeave, timeout);
  own.keep_alive.clear();
  if (failure) std::rethrow_exception(failure);
  if (!disagreement.empty()) raise_disagreement(disagreement, own.op, rank, size_);
}

bool ThreadHub::met(uint64_t generation, Phase phase) const {
  const uint64_t now = state_.load();
  // A rank that leaves waits for its readers even in a dead world: they are all inside and none of them waits.
  return generation_of(now) != generation || (phase == Phase::kEnter && is_dead(now));
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
  if (!spin([&] { return met(generation, phase); })) {
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
  raise_unusable(reason, fix, op, rank, size_);
}

void ThreadHub::post(const Address& address, const at::Tensor& message) {
  if (is_dead(state_.load())) raise_dead(address.source, "send");
  at::Tensor copy = message.detach().clone();
  std::lock_guard<std::mutex> lock(mutex_);
  Mailbox& box = mail_[address.key()];
  box.messages.emplace(box.posted++, std::move(copy));
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
