#include "ulysses/contract/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <regex>

#include "ulysses/base/error.h"

namespace ulysses::contract {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
using Policy = UlyssesContextParallelPolicy;
using base::Problem;

std::vector<std::string> ids(const std::vector<Problem>& problems) {
  std::vector<std::string> found;
  for (const Problem& problem : problems) found.push_back(problem.id);
  return found;
}

bool has(const std::vector<Problem>& problems, std::string_view id) {
  return std::any_of(problems.begin(), problems.end(), [id](const Problem& problem) { return problem.id == id; });
}

using Texts = std::vector<std::string>;

TEST(ValidateConfig, HoldsTheAsserts) {
  const Policy policy;
  EXPECT_FALSE(policy.validate_config(3000, 4).empty());
  EXPECT_TRUE(policy.validate_config(3008, 4).empty());
  EXPECT_EQ(policy.padded_seq_len(3000, 4), 3008);
  EXPECT_TRUE(policy.validate_config(3008, 8).empty());  // 3008 = 8 * 8 * 47
}

TEST(ValidateConfig, TextsAreExact) {
  Policy policy;
  const std::string cp011 =
      "[ulysses_attention] seq_len=3000 divides by cp_size=4 but not by cp_size*pad_multiple=4*8=32. Fix: pad to 3008 "
      "(752 per rank), or pad_multiple=1 (750 per rank), or require_seq_divisible=False. [CP011]";
  EXPECT_EQ(policy.validate_config(3000, 4), Texts{cp011});
  EXPECT_EQ(policy.validate_config(3001, 4),
            Texts{"[ulysses_attention] seq_len=3001 is not divisible by cp_size=4. Shards must be equal under this "
                  "policy. Fix: pad to 3008 (752 per rank), or require_seq_divisible=False. [CP010]"});
  policy.auto_pad = false;  // it says what to do with such a length, not whether the raw length divides
  EXPECT_EQ(policy.validate_config(3000, 4), Texts{cp011});
}

TEST(PolicyField, BackendNameIsCheckedWhereBackendsAreRegistered) {
  EXPECT_TRUE(check_policy(Policy{.backend_name = "mine"}).empty());
  EXPECT_NE(Policy{}, Policy{.backend_name = "mine"});
}

TEST(PolicyField, RequireSeqDivisibleOffTakesAnyLength) {
  const Policy policy{.require_seq_divisible = false};
  EXPECT_TRUE(policy.validate_config(3001, 4).empty());
  EXPECT_EQ(policy.padded_seq_len(3001, 4), 3001);
  EXPECT_EQ(policy.sequence_mode(), SequenceMode::kUneven);
}

TEST(PolicyField, AutoPadChoosesBetweenPadAndStrict) {
  EXPECT_EQ(Policy{}.sequence_mode(), SequenceMode::kPad);
  EXPECT_EQ(Policy{.auto_pad = false}.sequence_mode(), SequenceMode::kStrict);
}

TEST(PolicyField, PadMultipleSteersTheLength) {
  const Policy one{.pad_multiple = 1};
  EXPECT_FALSE(one.validate_config(3001, 4).empty());
  EXPECT_TRUE(one.validate_config(3000, 4).empty());
  EXPECT_EQ(one.padded_seq_len(3001, 4), 3004);
  EXPECT_EQ(one.padded_seq_len(3000, 4), 3000);
  EXPECT_EQ(Policy{.pad_multiple = 100}.padded_seq_len(3000, 4), 3200);
}

TEST(PolicyField, KvMustBeGlobalIsNotOptionalCP004) {
  EXPECT_TRUE(Policy{}.kv_must_be_global);
  EXPECT_EQ(ids(check_policy(Policy{.kv_must_be_global = false})), Texts{"CP004"});
}

// Which format a policy is for is known to a call alone: attention_rules_test.cpp.
TEST(PolicyField, OutputRestoreDimMustBeTheSequenceDimensionOfSomeFormatCP005) {
  for (const int64_t dim : {0, 1, 2}) EXPECT_EQ(ids(check_policy(Policy{.output_restore_dim = dim})), Texts{}) << dim;
  for (const int64_t dim : {3, -1, -3, 99}) {
    const auto problems = check_policy(Policy{.output_restore_dim = dim});
    ASSERT_EQ(ids(problems), Texts{"CP005"}) << dim;
    EXPECT_EQ(problems[0].fix, "output_restore_dim=1");
  }
}

TEST(SequenceDim, OfEveryFormat) {
  EXPECT_EQ(sequence_dim("bshd"), 1);
  EXPECT_EQ(sequence_dim("bhsd"), 2);
  EXPECT_EQ(sequence_dim("sbhd"), 0);
}

TEST(PolicyField, BaseProcessorIsFixedCP002) {
  const auto problems = check_policy(Policy{.base_processor = "Other"});
  ASSERT_EQ(ids(problems), Texts{"CP002"});
  EXPECT_NE(problems[0].what.find("Other"), std::string::npos);
  EXPECT_EQ(problems[0].fix, "base_processor=\"UlyssesAttentionProcessor\"");
}

TEST(PolicyField, RequiredChecksMayNotShrinkOrBeMisspeltCP003) {
  Policy policy;
  policy.required_checks = {"seq_divisible", "output_restore_dim", "kv_global_gatherd"};
  const auto problems = check_policy(policy);
  ASSERT_EQ(ids(problems), Texts{"CP003"});
  EXPECT_EQ(problems[0].what, "required_checks lacks kv_global_gathered and holds the unknown kv_global_gatherd");
  EXPECT_EQ(problems[0].rule, "Known: seq_divisible, kv_global_gathered, output_restore_dim");
  policy.required_checks = {"output_restore_dim", "kv_global_gathered", "seq_divisible"};
  EXPECT_TRUE(check_policy(policy).empty()) << "the order is free";
}

TEST(CheckConfig, SizesMustBePositiveCP006) {
  const Policy zero{.pad_multiple = 0};
  EXPECT_EQ(ids(check_config(zero, -1, 0)), (Texts{"CP006", "CP006", "CP006"}));
  EXPECT_THROW(zero.padded_seq_len(8, 1), base::Error);
  EXPECT_THROW(Policy{}.padded_seq_len(0, 4), base::Error);
  EXPECT_THROW(Policy{}.padded_seq_len(8, std::numeric_limits<int64_t>::min()), base::Error);
}

TEST(CheckConfig, OverflowIsAnErrorCP007) {
  EXPECT_EQ(ids(check_config(Policy{}, kMax, 4)), (Texts{"CP007", "CP010"}));
  EXPECT_EQ(ids(check_config(Policy{.pad_multiple = kMax}, 8, 4)), Texts{"CP007"});
  EXPECT_EQ(ids(check_config(Policy{}, kMax / 32 * 32, 4)), Texts{});
  EXPECT_EQ(Policy{}.padded_seq_len(kMax / 32 * 32, 4), kMax / 32 * 32);
  try {
    Policy{}.padded_seq_len(kMax, 4);
    FAIL();
  } catch (const base::Error& error) {
    EXPECT_EQ(error.id(), "CP007");
    EXPECT_EQ(std::string(error.what()).find("CP010"), std::string::npos);
  }
  EXPECT_EQ((Policy{.require_seq_divisible = false}.padded_seq_len(kMax, 4)), kMax);
}

TEST(CheckConfig, ReportsAllViolatedRulesInOrder) {
  const Policy policy{
      .kv_must_be_global = false, .output_restore_dim = 3, .base_processor = "x", .required_checks = {}};
  EXPECT_EQ(ids(check_config(policy, 3000, 4)), (Texts{"CP002", "CP003", "CP004", "CP005", "CP011"}));
}

TEST(PolicyFields, NamesEveryFieldOnce) {
  Texts names;
  for (const PolicyField& field : policy_fields()) names.emplace_back(field.name);
  EXPECT_EQ(names, (Texts{"backend_name", "require_seq_divisible", "auto_pad", "pad_multiple", "kv_must_be_global",
                          "output_restore_dim", "base_processor", "required_checks"}));
  EXPECT_EQ(policy_fields()[3].default_text, std::to_string(Policy{}.pad_multiple));
}

struct Config {
  Policy policy;
  int64_t seq_len = 0;
  int64_t cp_size = 0;
};

// Does what one alternative of a fix says; fails the test if it cannot be done.
Config applied(Config config, const std::string& fix) {
  std::smatch match;
  if (std::regex_search(fix, match, std::regex("^pad to (\\d+) \\((\\d+) per rank\\)"))) {
    config.seq_len = std::stoll(match[1]);
    EXPECT_EQ(std::stoll(match[2]) * config.cp_size, config.seq_len) << fix;
  } else if (std::regex_search(fix, match, std::regex("^(seq_len|cp_size|pad_multiple|output_restore_dim)=(\\d+)"))) {
    const int64_t value = std::stoll(match[2]);
    int64_t& field = match[1] == "seq_len"        ? config.seq_len
                     : match[1] == "cp_size"      ? config.cp_size
                     : match[1] == "pad_multiple" ? config.policy.pad_multiple
                                                  : config.policy.output_restore_dim;
    EXPECT_NE(field, value) << "names what is already so: " << fix;
    field = value;
  } else if (fix == "require_seq_divisible=False") {
    EXPECT_TRUE(config.policy.require_seq_divisible);
    config.policy.require_seq_divisible = false;
  } else if (fix == "kv_must_be_global=True") {
    config.policy.kv_must_be_global = true;
  } else if (fix == "base_processor=\"UlyssesAttentionProcessor\"") {
    config.policy.base_processor = "UlyssesAttentionProcessor";
  } else if (fix.rfind("required_checks=(", 0) == 0) {
    config.policy.required_checks.clear();
    const std::regex quoted("\"([a-z_]+)\"");
    for (std::sregex_iterator it(fix.begin(), fix.end(), quoted), end; it != end; ++it) {
      config.policy.required_checks.push_back((*it)[1]);
    }
  } else {
    ADD_FAILURE() << "no one can apply: " << fix;
  }
  return config;
}

Texts alternatives(const std::string& fix) {
  static const std::regex separator(", or ");
  return {std::sregex_token_iterator(fix.begin(), fix.end(), separator, -1), std::sregex_token_iterator()};
}

TEST(EveryPrintedFix, WorksWhenApplied) {
  const std::vector<Config> broken = {
      {Policy{}, 3000, 4},
      {Policy{}, 3001, 4},
      {Policy{.auto_pad = false}, 3001, 4},
      {Policy{}, 7, 4},
      {Policy{.pad_multiple = 1}, 3001, 4},
      {Policy{.pad_multiple = 0}, 3000, 4},
      {Policy{}, 0, 4},
      {Policy{}, -5, 3},
      {Policy{.require_seq_divisible = false}, 0, 3},
      {Policy{}, 3008, 0},
      {Policy{}, kMax, 4},
      {Policy{.pad_multiple = kMax}, 8, 4},
      {Policy{.pad_multiple = kMax}, 9, 4},
      {Policy{.pad_multiple = kMax / 2}, kMax - 3, 2},
      {Policy{.kv_must_be_global = false}, 3008, 4},
      {Policy{.output_restore_dim = 3}, 3008, 4},
      {Policy{.base_processor = ""}, 3008, 4},
      {Policy{.required_checks = {"typo"}}, 3008, 4},
  };
  for (const Config& config : broken) {
    const auto problems = check_config(config.policy, config.seq_len, config.cp_size);
    EXPECT_FALSE(problems.empty());
    for (const Problem& problem : problems) {
      EXPECT_FALSE(problem.fix.empty()) << problem.id;
      for (const std::string& fix : alternatives(problem.fix)) {
        const Config fixed = applied(config, fix);
        const auto left = check_config(fixed.policy, fixed.seq_len, fixed.cp_size);
        EXPECT_FALSE(has(left, problem.id)) << base::format(problem) << "\nafter " << fix;
        if (problems.size() == 1) {
          EXPECT_TRUE(left.empty()) << fix << " leads to " << base::format(left[0]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ulysses::contract
