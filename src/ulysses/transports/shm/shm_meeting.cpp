#include "ulysses/transports/shm/shm_meeting.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "ulysses/base/text.h"
#include "ulysses/transports/collective/contribution.h"
#include "ulysses/transports/collective/raise.h"

namespace ulysses::transports {
namespace {

constexpr uint32_t kDead = 1;
constexpr uint32_t state_before(uint32_t meeting) { return (meeting - 1) << 1; }
constexpr uint32_t state_after(uint32_t meeting) { return meeting << 1; }

ProcessId process_of(const RankRecord& record) {
  return {static_cast<int64_t>(record.pid.load()), record.start.load(), record.pid_namespace.load()};
}

std::string last_call(const RankRecord& record) {
  if (record.calls.load() == 0) return "it has made no call of this group";
  return base::cat("its last call was ", name_of_op(record.op.load()), ", number ", record.calls.load(),
                   " of this group");
}

// "what\0fix\0", cut where it is too long.
void write_words(std::array<char, 2048>& words, const std::string& what, const std::string& fix) {
  constexpr size_t kFix = 512;
  words.fill('\0');
  const size_t split = std::min(what.size(), words.size() - kFix - 2);
  std::memcpy(words.data(), what.data(), split);
  std::memcpy(words.data() + split + 1, fix.data(), std::min(fix.size(), kFix));
}

}  // namespace

ShmMeeting::ShmMeeting(ShmLayout layout, int64_t rank) : layout_(layout), rank_(rank) {
  const ProcessId own = own_process();
  RankRecord& record = layout_.record(rank_);
  record.pid_namespace.store(own.pid_namespace);
  record.start.store(own.start);
  record.pid.store(static_cast<uint64_t>(own.pid));
}

void ShmMeeting::begin_call(std::string_view op) {
  if (is_dead()) raise_dead(op);
  RankRecord& own = layout_.record(rank_);
  if (own.left.load() != 0) {
    throw base::Error({{"CP062", base::ErrorKind::kCommunication, base::cat("rank ", rank_, " has left the group"),
                        "A group that was destroyed serves no more calls", "create the group again on every rank"}},
                      op, rank_, size());
  }
  own.op.store(number_of_op(op));
  own.calls.fetch_add(1);
}

bool ShmMeeting::is_dead() const { return (layout_.head().state.word.load() & kDead) != 0; }

bool ShmMeeting::has_come(int64_t peer, uint32_t meeting) const {
  return static_cast<int32_t>(layout_.record(peer).arrived.load() - meeting) >= 0;
}

bool ShmMeeting::all_have_come(uint32_t meeting) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (!has_come(peer, meeting)) return false;
  }
  return true;
}

// Complete, or never to be. The next meeting cannot complete before this rank comes to it.
bool ShmMeeting::is_over(uint32_t meeting) const { return layout_.head().state.word.load() != state_before(meeting); }

void ShmMeeting::complete(uint32_t meeting) {
  uint32_t expected = state_before(meeting);
  if (layout_.head().state.word.compare_exchange_strong(expected, state_after(meeting))) ring(layout_.head().state);
}

void ShmMeeting::meet(std::string_view op, std::chrono::milliseconds timeout) {
  const uint32_t meeting = ++met_;
  const auto deadline = Clock::now() + timeout;
  layout_.record(rank_).arrived.store(meeting);
  if (all_have_come(meeting)) complete(meeting);
  const auto over = [&] { return is_over(meeting); };
  if (!wait_for(layout_.head().state, deadline, over, [&] { look(meeting, op); })) give_up(meeting, op, timeout);
  // A group that died after this meeting says so at the next call.
  if ((layout_.head().state.word.load() | kDead) != (state_after(meeting) | kDead)) raise_dead(op);
}

void ShmMeeting::look(uint32_t meeting, std::string_view op) {
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (peer == rank_ || has_come(peer, meeting)) continue;
    const std::string loss = find_loss(peer);
    if (loss.empty() || has_come(peer, meeting)) continue;  // it came and was then lost: this meeting is not
    try_kill(state_before(meeting), base::cat("rank ", rank_, " waits in ", op, " for ", loss),
             base::cat("find why rank ", peer, " is gone, then start the ranks again"));
    return;
  }
  if (all_have_come(meeting)) complete(meeting);  // the last to come was killed before it could say so
}

void ShmMeeting::give_up(uint32_t meeting, std::string_view op, std::chrono::milliseconds timeout) {
  std::vector<int64_t> absent;
  std::vector<std::string> descriptions;
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (has_come(peer, meeting)) continue;
    absent.push_back(peer);
    descriptions.push_back(base::cat("rank ", peer, ": ", describe(peer)));
  }
  if (absent.empty()) {
    complete(meeting);
    return;
  }
  const std::string names = name_ranks(absent);
  try_kill(state_before(meeting),
           base::cat("rank ", rank_, " waited ", timeout.count(), " ms in ", op, " for ", names, ", which never came (",
                     base::join(descriptions, "; "), ')'),
           base::cat("find why ", names, " did not call ", op, ", or use a timeout above ", timeout.count(),
                     " ms; then create the group again"));
}

bool ShmMeeting::try_kill(uint32_t state, const std::string& what, const std::string& fix) {
  const std::lock_guard<std::mutex> lock(last_words_);
  SegmentHead& head = layout_.head();
  if (head.state.word.load() != state) return false;  // and the last words may be in use
  write_words(layout_.record(rank_).last_words, what, fix);
  if (!head.state.word.compare_exchange_strong(state, state | kDead)) return false;
  head.killer.store(static_cast<uint32_t>(rank_) + 1);
  ring(head.state);
  return true;
}

void ShmMeeting::kill(const std::string& what, const std::string& fix) {
  while (!is_dead()) try_kill(layout_.head().state.word.load() & ~kDead, what, fix);
}

void ShmMeeting::raise_dead(std::string_view op) const {
  // Between the death and the name of its cause there are a few instructions of another process, which may be killed.
  for (int i = 0; i < 100 && layout_.head().killer.load() == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::string what = "a rank gave the group up and ended before it could say why";
  std::string fix = "start the ranks again";
  if (const uint32_t killer = layout_.head().killer.load(); killer != 0) {
    const auto& words = layout_.record(static_cast<int64_t>(killer) - 1).last_words;
    what = words.data();
    fix = words.data() + what.size() + 1;
  }
  raise_unusable(std::move(what), std::move(fix), op, rank_, size());
}

void ShmMeeting::leave() { layout_.record(rank_).left.store(1); }

std::string ShmMeeting::find_loss(int64_t peer) const {
  const RankRecord& record = layout_.record(peer);
  if (record.left.load() != 0) return base::cat("rank ", peer, ", which left the group; ", last_call(record));
  if (life_of(process_of(record)) != Life::kEnded) return {};
  return base::cat("rank ", peer, ", whose process ", record.pid.load(), " ended; ", last_call(record));
}

std::string ShmMeeting::describe(int64_t peer) const {
  const RankRecord& record = layout_.record(peer);
  if (record.pid.load() == 0) return "it never opened the segment";
  const Life life = life_of(process_of(record));
  const char* state = life == Life::kStopped   ? " is stopped; "
                      : life == Life::kEnded   ? " ended; "
                      : life == Life::kRunning ? " is running; "
                                               : " cannot be seen from here; ";
  return base::cat("process ", record.pid.load(), state, last_call(record));
}

}  // namespace ulysses::transports
