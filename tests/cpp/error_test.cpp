#include "ulysses/base/error.h"

#include <gtest/gtest.h>

#include "ulysses/base/text.h"

namespace ulysses::base {
namespace {

const Problem kFull{.id = "CP010",
                    .kind = ErrorKind::kInvalidArgument,
                    .what = "seq_len=3001 is not divisible by cp_size=4",
                    .rule = "Shards must be equal under this policy",
                    .fix = "pad to 3008 (752 per rank)"};

TEST(Format, FollowsTheTemplate) {
  EXPECT_EQ(format(kFull),
            "seq_len=3001 is not divisible by cp_size=4. Shards must be equal under this policy. "
            "Fix: pad to 3008 (752 per rank). [CP010]");
  EXPECT_EQ(format(kFull, "op", 1, 4),
            "[op] seq_len=3001 is not divisible by cp_size=4 (rank 1 of cp_size 4). Shards must be equal under this "
            "policy. Fix: pad to 3008 (752 per rank). [CP010]");
}

TEST(Format, LeavesOutWhatIsEmptyAndDoublesNoPeriod) {
  EXPECT_EQ(format({.id = "CP062", .what = "rank 2 raised.", .rule = "", .fix = ""}, "op"),
            "[op] rank 2 raised. [CP062]");
}

TEST(Error, CarriesAllProblemsAndTheFirstId) {
  const Problem second{.id = "CP044", .kind = ErrorKind::kUnsupported, .what = "b", .rule = "", .fix = ""};
  const Error error({kFull, second}, "op");
  EXPECT_EQ(error.id(), "CP010");
  EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error.what(), format(kFull, "op") + "\n[op] b. [CP044]");
}

TEST(Error, WithoutAProblemIsOurBug) { EXPECT_EQ(Error({}, "op").kind(), ErrorKind::kInternal); }

TEST(RaiseIfAny, ThrowsOnlyWithAProblem) {
  EXPECT_NO_THROW(raise_if_any({}, "op"));
  EXPECT_THROW(raise_if_any({kFull}, "op"), Error);
}

TEST(Text, JoinsAndConcatenates) {
  EXPECT_EQ(cat("a=", 1, ", b=", "c"), "a=1, b=c");
  EXPECT_EQ(join(std::vector<int>{1, 2, 3}), "1, 2, 3");
  EXPECT_EQ(join(std::vector<int>{}), "");
}

TEST(ErrorKindNames, AreDistinct) {
  EXPECT_EQ(to_string(ErrorKind::kInvalidArgument), "invalid_argument");
  EXPECT_EQ(to_string(ErrorKind::kUnsupported), "unsupported");
  EXPECT_EQ(to_string(ErrorKind::kRankMismatch), "rank_mismatch");
  EXPECT_EQ(to_string(ErrorKind::kCommunication), "communication");
  EXPECT_EQ(to_string(ErrorKind::kInternal), "internal");
}

}  // namespace
}  // namespace ulysses::base
