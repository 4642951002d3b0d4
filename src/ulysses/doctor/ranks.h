#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "ulysses/doctor/rank_answer.h"

namespace ulysses::doctor {

// The ranks that are asked. The one thing that differs between threads, processes and a launcher's world; everything
// else of the doctor sees questions and answers only.
class Ranks {
 public:
  virtual ~Ranks() = default;
  // One answer per rank of question.c.cp_size, in rank order. Always returns: a rank that crashes or hangs is said to.
  virtual std::vector<RankAnswer> ask(const Question& question) = 0;
};

// Ranks as threads of this process, a new world a question. A rank that fails releases those that wait for it.
class ThreadRanks : public Ranks {
 public:
  // Units: hang_limit, how long a rank may take; a thread that is stuck longer is left behind.
  explicit ThreadRanks(Target target, std::chrono::milliseconds hang_limit = std::chrono::seconds(5));
  std::vector<RankAnswer> ask(const Question& question) override;
  // Threads that never came back; while there is one, the process should end by _exit.
  int64_t stuck_threads() const { return stuck_threads_; }

 private:
  Target target_;
  std::chrono::milliseconds hang_limit_;
  int64_t stuck_threads_ = 0;
};

// The ranks of a group that exists already (torchrun): every rank runs the doctor, answers for itself, and gets the
// answers of all. A crash ends the program, and a hang ends with the group's timeout. A question for another number of
// ranks is refused.
// `answers`: a group of the same ranks over which the answers travel. With the target's own, a rank that raises alone
// meets the others' collective with the doctor's, and the report may never come.
// Comm: a few small collectives a question; every rank must ask the same questions.
class GroupRanks final : public Ranks {
 public:
  GroupRanks(Target target, exchange::Group group, std::optional<exchange::Group> answers = std::nullopt)
      : target_(std::move(target)), group_(group), answers_(answers.value_or(group)) {}
  std::vector<RankAnswer> ask(const Question& question) override;

 private:
  Target target_;
  exchange::Group group_;
  exchange::Group answers_;
};

}  // namespace ulysses::doctor
