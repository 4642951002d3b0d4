#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "ulysses/base/text.h"
#include "ulysses/doctor/ranks.h"
#include "ulysses/transports/thread/keep_num_threads.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::doctor {
namespace {

// What the threads of one question share with the asking thread; they keep it alive, also those that are left behind.
struct Meeting {
  Meeting(const Question& asked, Target called, std::chrono::milliseconds hang_limit)
      : question(asked),
        target(std::move(called)),
        world(asked.c.cp_size, hang_limit),
        answers(static_cast<size_t>(asked.c.cp_size)),
        arrived(static_cast<size_t>(asked.c.cp_size), false) {}

  void answer(int64_t rank) {
    at::set_num_threads(1);
    RankAnswer given = answer_on_rank(question, target, exchange::Group(world.group(rank)));
    // Ranks that wait for this one need not wait for the limit.
    if (given.outcome != Outcome::kReturned && given.outcome != Outcome::kDeclined) world.abort(rank, given.message);
    const std::lock_guard<std::mutex> lock(mutex);
    answers[static_cast<size_t>(rank)] = std::move(given);
    arrived[static_cast<size_t>(rank)] = true;
    wake.notify_one();
  }

  const Question question;
  const Target target;
  transports::ThreadWorld world;
  std::vector<RankAnswer> answers;
  std::vector<bool> arrived;
  std::mutex mutex;
  std::condition_variable wake;
};

std::string no_answer(std::chrono::milliseconds hang_limit) {
  return base::cat("no answer within ", static_cast<double>(hang_limit.count()) / 1000, " s");
}

// What the transport raised is no answer of the target: the rank waited for one that failed, or too long, or the ranks
// called collectives that don't fit together, which over Gloo ends the process.
void classify(RankAnswer& answer, std::chrono::milliseconds hang_limit) {
  const std::string& text = answer.message;
  const auto says = [&](std::string_view words) { return text.find(words) != std::string::npos; };
  if (answer.outcome != Outcome::kRaised || !says("[CP062]")) return;
  if (says(" waited ")) {
    answer.outcome = Outcome::kHung;
    answer.message = base::cat(no_answer(hang_limit), ": ", text);
  } else {
    answer.outcome = says(" failed: ") ? Outcome::kReleased : Outcome::kCrashed;
  }
}

}  // namespace

ThreadRanks::ThreadRanks(Target target, std::chrono::milliseconds hang_limit)
    : target_(std::move(target)), hang_limit_(hang_limit) {}

std::vector<RankAnswer> ThreadRanks::ask(const Question& question) {
  const transports::KeepNumThreads keep;
  const auto meeting = std::make_shared<Meeting>(question, target_, hang_limit_);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < question.c.cp_size; ++rank)
    threads.emplace_back([meeting, rank] { meeting->answer(rank); });

  std::unique_lock<std::mutex> lock(meeting->mutex);
  const auto all_arrived = [&] {
    return std::find(meeting->arrived.begin(), meeting->arrived.end(), false) == meeting->arrived.end();
  };
  // The world's own limit ends every wait for another rank; a second more catches one that waits for something else.
  meeting->wake.wait_for(lock, hang_limit_ + std::chrono::seconds(1), all_arrived);
  const std::vector<bool> arrived = meeting->arrived;
  std::vector<RankAnswer> answers(arrived.size());
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    if (arrived[rank]) {
      answers[rank] = meeting->answers[rank];
      classify(answers[rank], hang_limit_);
    } else {
      answers[rank].outcome = Outcome::kHung;
      answers[rank].message = no_answer(hang_limit_);
      ++stuck_threads_;
    }
  }
  lock.unlock();
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    if (arrived[rank]) {
      threads[rank].join();
    } else {
      threads[rank].detach();
    }
  }
  return answers;
}

}  // namespace ulysses::doctor
