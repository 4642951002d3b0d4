#include "ulysses/partition/check_report.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace ulysses::partition {
namespace {

struct Report {
  std::string text;
  int exit_code = -1;
  bool has(std::string_view part) const { return text.find(part) != std::string::npos; }
};

Report report(const CheckRequest& request) {
  Report result;
  result.text = check_report(request, &result.exit_code);
  return result;
}

TEST(CheckReport, ShowsProblemsAndWhoHoldsWhat) {
  const Report result = report({.seq_len = 3000, .cp_size = 4, .num_heads = 30, .num_kv_heads = 6});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(result.has("1 problem:"));
  EXPECT_TRUE(
      result.has("Fix: pad to 3008 (752 per rank), or pad_multiple=1 (750 per rank), or "
                 "require_seq_divisible=False. [CP011]"));
  EXPECT_TRUE(result.has("Legal lengths near by: 2944, 2976, 3008, 3040"));
  EXPECT_TRUE(
      result.has("Legal cp_size near by, without padding: 1, 3, 5, 15 for seq_len=3000"));  // 3000 = 8 * 3 * 5 * 25
  EXPECT_TRUE(result.has("Head degrees: 1, 2, 3, 6 "));
  EXPECT_TRUE(result.has("0     [0, 752)      752    752          [0, 8)       8      [0, 2)\n")) << result.text;
  EXPECT_TRUE(result.has("3     [2256, 3000)  744    752          [23, 30)     7      [4, 6)\n")) << result.text;
}

TEST(CheckReport, ExitsZeroWithoutAProblem) {
  const Report result = report({.seq_len = 3008, .cp_size = 8, .num_heads = 4});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(result.has("No problem.\n"));
  EXPECT_TRUE(result.has("kv_heads=4"));
  EXPECT_TRUE(result.has("none         0      none\n")) << "ranks without heads are shown:\n" << result.text;
}

TEST(CheckReport, ListsAllProblemsAtOnce) {
  CheckRequest request{.seq_len = 3001, .cp_size = 4, .num_heads = 7, .num_kv_heads = 2};
  request.policy.backend_name = "x";
  request.policy.kv_must_be_global = false;
  request.policy.output_restore_dim = 3;
  const Report result = report(request);
  EXPECT_EQ(result.exit_code, 1);
  for (const char* id : {"[CP001]", "[CP004]", "[CP005]", "[CP010]", "[CP023]"}) EXPECT_TRUE(result.has(id)) << id;
  EXPECT_TRUE(result.has("H_kv one of 1, 7"));
  EXPECT_FALSE(result.has("Who holds what"));
}

TEST(CheckReport, AStrategyIsNoBackendCP001) {
  CheckRequest request{.seq_len = 3008, .cp_size = 4};
  request.policy.backend_name = "allgather_kv";
  const Report result = report(request);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(result.has("Known: ulysses. Fix: backend_name=\"ulysses\". [CP001]")) << result.text;
}

TEST(CheckReport, UnevenModeTakesTheLengthAsItIs) {
  CheckRequest request{.seq_len = 3001, .cp_size = 4};
  request.policy.require_seq_divisible = false;
  const Report result = report(request);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(result.has("Legal lengths near by: any"));
  EXPECT_TRUE(result.has("0     [0, 751)      751    751\n")) << result.text;
}

TEST(CheckReport, StrictModeShowsThePaddedPlan) {
  CheckRequest request{.seq_len = 3001, .cp_size = 4};
  request.policy.auto_pad = false;
  const Report result = report(request);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(result.has("Who holds what once padded (seq_len 3001 in 3008 rows)"));
}

TEST(CheckReport, AnyRequestGetsAnAnswer) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  for (const int64_t seq_len : {kMin, int64_t{0}, int64_t{1}, kMax}) {
    for (const int64_t cp_size : {kMin, int64_t{0}, int64_t{7}, int64_t{1000}, kMax}) {
      for (const int64_t heads : {kMin, int64_t{0}, int64_t{999}, kMax}) {
        for (const bool divisible : {true, false}) {
          CheckRequest request{.seq_len = seq_len, .cp_size = cp_size, .num_heads = heads};
          request.policy.require_seq_divisible = divisible;
          const Report result = report(request);
          EXPECT_TRUE(result.exit_code == 0 || result.exit_code == 1);
          EXPECT_FALSE(result.text.empty());
        }
      }
    }
  }
  EXPECT_NO_THROW(check_report({.seq_len = 8}, nullptr));
}

}  // namespace
}  // namespace ulysses::partition
