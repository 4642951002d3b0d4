// The check that a user runs on any attention of theirs: one sentence, equal on every rank.
#include <gtest/gtest.h>

#include "collectives.h"
#include "reference_attention.h"
#include "ulysses/doctor/check_attention.h"
#include "ulysses/processors/attention.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::doctor {
namespace {

using namespace ulysses::testing;
using exchange::Group;
using transports::run_ranks;

// The check's verdict on every rank; they must be equal.
std::string diagnosis(int64_t world,
                      const std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                     const Group& group)>& attention) {
  std::vector<AttentionCheck> checks(static_cast<size_t>(world));
  run_ranks(world, [&](int64_t rank, const GroupPtr& process_group) {
    const Group group(process_group);
    checks[static_cast<size_t>(rank)] = check_attention(
        [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) { return attention(q, k, v, group); },
        group);
  });
  for (const AttentionCheck& check : checks) EXPECT_EQ(check.text(), checks[0].text());
  EXPECT_EQ(checks[0].ok(), checks[0].diagnosis == "ok");
  return checks[0].diagnosis;
}

at::Tensor ours(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Group& group) {
  return processors::ulysses_attention(q, k, v, group).out;
}

at::Tensor plain(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  const at::Tensor scores = at::matmul(q.transpose(1, 2), k.permute({0, 2, 3, 1})) * scale;
  return at::matmul(scores.softmax(-1), v.transpose(1, 2)).transpose(1, 2);
}

double default_scale(const at::Tensor& q) { return 1.0 / std::sqrt(static_cast<double>(q.size(3))); }

TEST(CheckAttention, OursIsOk) {
  for (const int64_t world : {1, 2, 3, 4}) EXPECT_EQ(diagnosis(world, ours), "ok");
}

TEST(CheckAttention, LocalKeysAreNamedWithTheTokensThatNeverMeet) {
  const auto local = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Group&) {
    return plain(q, k, v, default_scale(q));
  };
  EXPECT_EQ(diagnosis(2, local), "each rank attends only to its own tokens: keys 8-15 never influence queries 0-7");
  EXPECT_EQ(diagnosis(1, local), "ok");
}

TEST(CheckAttention, OneSentencePerFault) {
  using Attention = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Group&)>;
  const std::vector<std::pair<Attention, std::string>> faults = {
      {[](const auto& q, const auto& k, const auto& v, const Group& group) { return ours(q, k, v, group).flip(1); },
       "the tokens are out of order: token 0, head 0 holds what belongs to token 7, head 0"},
      {[](const auto& q, const auto& k, const auto& v, const Group& group) {
         return ours(q * std::sqrt(static_cast<double>(q.size(3))), k, v, group);
       },
       "the softmax scale is 1 (no scale) instead of 0.25"},
      {[](const auto& q, const auto& k, const auto& v, const Group& group) { return ours(q, k, v, group).detach(); },
       "the output carries no gradient: backward would train nothing"},
      {[](const auto& q, const auto& k, const auto& v, const Group& group) {
         return ours(q, k, v * 0.5 + v.detach() * 0.5, group);
       },
       "the gradient of v is 0.5 times what it must be"},
      {[](const auto& q, const auto& k, const auto& v, const Group& group) {
         return ours(q, k, v, group).narrow(1, 0, 4);
       },
       "ranks 0-1: out has shape [2, 4, 4, 16] instead of [2, 8, 4, 16]"},
      {[](const auto& q, const auto&, const auto&, const Group&) -> at::Tensor {
         TORCH_CHECK_VALUE(q.size(1) == 0, "not today");
         return q;
       },
       "every rank raised: not today"},
  };
  for (const auto& [attention, sentence] : faults) {
    const std::string text = diagnosis(2, attention);
    EXPECT_EQ(text.substr(0, sentence.size()), sentence);
  }
}

}  // namespace
}  // namespace ulysses::doctor
