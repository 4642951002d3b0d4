// Questions to ranks that are threads, and to the ranks of a group that is there already.
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "collectives.h"
#include "reference_attention.h"
#include "ulysses/doctor/cases.h"
#include "ulysses/doctor/ranks.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::doctor {
namespace {

using namespace ulysses::testing;
using exchange::Group;
using processors::AttentionResult;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kForever{60'000};  // a test that waits this long has failed by what it sees then

Question plain_question(int64_t world = 2) { return make_question(plain_case(world, "")); }

TEST(DoctorThreadRanks, ARankThatThrowsReleasesTheOthers) {
  ThreadRanks ranks(
      [](const RankCall& call, const Group& group) -> AttentionResult {
        if (group.rank() == 1) throw std::runtime_error("cannot attend\nand a second line");
        group.gather_numbers({1});
        return {call.q, {}};
      },
      kForever);
  const auto answers = ranks.ask(plain_question(3));
  ASSERT_EQ(answers.size(), 3U);
  EXPECT_EQ(answers[1].outcome, Outcome::kRaised);
  EXPECT_EQ(answers[1].message, "cannot attend");
  EXPECT_EQ(answers[0].outcome, Outcome::kReleased);
  EXPECT_EQ(answers[2].outcome, Outcome::kReleased);
  EXPECT_EQ(ranks.stuck_threads(), 0);
}

TEST(DoctorThreadRanks, ARankThatNeverComesIsHungAndTheAskReturns) {
  std::promise<void> end;
  std::weak_ptr<int> thread;  // lives as long as the thread that is left behind
  {
    const auto held = std::make_shared<int>();
    thread = held;
    const Target waits = [held, ended = end.get_future().share()](const RankCall& call, const Group& group) {
      if (group.rank() == 1) ended.wait();
      group.gather_numbers({1});
      return AttentionResult{call.q, {}};
    };
    ThreadRanks ranks(waits, Milliseconds(300));
    const auto answers = ranks.ask(plain_question());
    EXPECT_EQ(answers[0].outcome, Outcome::kHung);
    EXPECT_TRUE(contains(answers[0].message, "no answer within 0.3 s: ")) << answers[0].message;
    EXPECT_TRUE(contains(answers[0].message, "rank 1")) << answers[0].message;
    EXPECT_EQ(answers[1].outcome, Outcome::kHung);
    EXPECT_EQ(answers[1].message, "no answer within 0.3 s");
    EXPECT_EQ(ranks.stuck_threads(), 1);
  }
  EXPECT_FALSE(thread.expired());
  end.set_value();
  while (!thread.expired()) std::this_thread::yield();  // no thread of a test outlives it
}

TEST(DoctorThreadRanks, CollectivesThatDoNotFitAreACrashOnEveryRank) {
  ThreadRanks ranks([](const RankCall& call, const Group& group) -> AttentionResult {
    group.gather_numbers(std::vector<int64_t>(static_cast<size_t>(group.rank() + 1)));
    return {call.q, {}};
  });
  for (const RankAnswer& answer : ranks.ask(plain_question())) {
    EXPECT_EQ(answer.outcome, Outcome::kCrashed);
    EXPECT_TRUE(contains(answer.message, "[CP062]")) << answer.message;
  }
}

TEST(DoctorThreadRanks, ARankGetsItsOwnRowsAndWhatItWritesIsSeen) {
  const Question question = plain_question();
  const auto writes = [](const RankCall& call, const Group& group) -> AttentionResult {
    if (group.rank() == 1) call.v.detach().add_(1);
    return {call.q * 2 + call.k.sum() * 0 + call.v.sum() * 0, {}};
  };
  const auto answers = ThreadRanks(writes).ask(question);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const RankAnswer& answer = answers[static_cast<size_t>(rank)];
    EXPECT_TRUE(at::equal(answer.out, question.q.narrow(1, 8 * rank, 8) * 2));
    EXPECT_TRUE(at::equal(answer.dq, question.grad_out.narrow(1, 8 * rank, 8) * 2));
    EXPECT_EQ(answer.violation, rank == 1 ? "the call writes to its input v" : "");
  }
}

TEST(DoctorThreadRanks, BytesAreCountedWhereAskedFor) {
  Question question = plain_question();
  question.c.backward = false;
  EXPECT_EQ(ThreadRanks(registered_target()).ask(question)[0].bytes_sent, 0);
  question.count_bytes = true;
  // Half of q, k and v (2 · 8 · 4 · 16 numbers of 4 bytes each) goes to the other rank and half of out comes back;
  // the rest are the lengths and fingerprints that the ranks compare.
  const int64_t payload = 4 * (2 * 8 * 4 * 16 * 4) / 2;
  for (const RankAnswer& answer : ThreadRanks(registered_target()).ask(question)) {
    EXPECT_GE(answer.bytes_sent, payload);
    EXPECT_LT(answer.bytes_sent, payload + 2048);
    EXPECT_GE(answer.collectives, 2);
  }
}

// The answers that every rank of a group of threads gets.
std::vector<std::vector<RankAnswer>> group_answers(const Question& question, const Target& target, int64_t world) {
  std::vector<std::vector<RankAnswer>> answers(static_cast<size_t>(world));
  transports::run_ranks(world, [&](int64_t rank, const GroupPtr& group) {
    answers[static_cast<size_t>(rank)] = GroupRanks(target, Group(group)).ask(question);
  });
  return answers;
}

void expect_same(const RankAnswer& got, const RankAnswer& wanted) {
  EXPECT_EQ(got.outcome, wanted.outcome);
  EXPECT_EQ(got.message, wanted.message);
  EXPECT_EQ(got.violation, wanted.violation);
  EXPECT_EQ(got.collectives, wanted.collectives);
  EXPECT_EQ(got.bytes_sent, wanted.bytes_sent);
  for (const auto member : {&RankAnswer::out, &RankAnswer::lse, &RankAnswer::dq, &RankAnswer::dk, &RankAnswer::dv}) {
    const at::Tensor &x = got.*member, &y = wanted.*member;
    ASSERT_EQ(x.defined(), y.defined());
    if (!x.defined()) continue;
    EXPECT_EQ(x.scalar_type(), y.scalar_type());
    EXPECT_TRUE(at::equal(x.nan_to_num(7), y.nan_to_num(7))) << x.sizes() << " and " << y.sizes();
  }
}

TEST(DoctorGroupRanks, EveryRankGetsWhatThreadRanksAnswer) {
  Case trained = plain_case(2, "");
  trained.is_causal = trained.return_lse = true;
  Case uneven = plain_case(3, "allgather_kv");
  set_shards(uneven, {5, 0, 2});
  uneven.dtype = "bfloat16", uneven.backward = false;
  Case refused = plain_case(2, "");
  refused.window = 3;
  const Target nan = [](const RankCall& call, const Group&) -> AttentionResult {
    return {(call.q * std::numeric_limits<double>::quiet_NaN()).to(at::kHalf), {}};
  };
  const Target one_raises = [](const RankCall& call, const Group& group) -> AttentionResult {
    if (group.rank() == 1) throw std::runtime_error("cannot attend");
    return {call.q, {}};
  };
  const std::vector<std::pair<Case, Target>> questions = {
      {trained, registered_target()},  {uneven, registered_target()}, {refused, registered_target()},
      {plain_case(2, ""), one_raises}, {plain_case(4, ""), nan},
  };
  for (const auto& [c, target] : questions) {
    SCOPED_TRACE(c.id());
    const Question question = make_question(c);
    const auto wanted = ThreadRanks(target).ask(question);
    for (const auto& answers : group_answers(question, target, c.cp_size)) {
      ASSERT_EQ(answers.size(), wanted.size());
      for (size_t rank = 0; rank < wanted.size(); ++rank) expect_same(answers[rank], wanted[rank]);
    }
  }
}

TEST(DoctorGroupRanks, AQuestionForAnotherNumberOfRanksIsRefused) {
  for (const auto& answers : group_answers(plain_question(2), registered_target(), 3)) {
    ASSERT_EQ(answers.size(), 2U);
    for (const RankAnswer& answer : answers) {
      EXPECT_EQ(answer.outcome, Outcome::kRaised);
      EXPECT_EQ(answer.message, "a group of 3 ranks cannot answer for cp_size=2");
    }
  }
}

}  // namespace
}  // namespace ulysses::doctor
