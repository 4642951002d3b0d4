#include "ulysses/contract/options_text.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ulysses/base/error.h"

namespace ulysses::contract {
namespace {

TEST(OptionsText, EmptyTextIsEveryDefault) {
  const AttentionOptions options = options_from_text("");
  EXPECT_EQ(options.policy, UlyssesContextParallelPolicy{});
  EXPECT_EQ(options.strategy, "ulysses");
  EXPECT_EQ(options.kernel, "auto");
  EXPECT_TRUE(options.requested.empty());
  EXPECT_EQ(options.softcap, std::nullopt);
  EXPECT_EQ(options.mask_q + options.mask_kv + options.joint_problem, "");
  EXPECT_EQ(options.joint_len, 0);
  EXPECT_EQ(options.joint_position, "prefix");
}

TEST(OptionsText, EveryLineSetsItsField) {
  const AttentionOptions options = options_from_text(
      "strategy=allgather_kv\nkernel=math\nagreement=always\nqkv_format=sbhd\nkv_role=replicated\n"
      "causal_alignment=bottom_right\nouter=allgather_kv\ncp_size=4\ncp_rank=1\nkv_cp_rank=2\nrequested=window,"
      "dropout\nsoftcap=30.5\nmask_q=local\nmask_kv=global\nmask_type=BlockMask\nsinks_type=list\njoint_len=7\njoint_"
      "position=suffix\n"
      "joint_valid_lens=3,0\njoint_problem=joint.q is a=b\n");
  EXPECT_EQ(options.strategy, "allgather_kv");
  EXPECT_EQ(options.kernel, "math");
  EXPECT_EQ(options.agreement, "always");
  EXPECT_EQ(options.qkv_format, "sbhd");
  EXPECT_EQ(options.kv_role, "replicated");
  EXPECT_EQ(options.causal_alignment, "bottom_right");
  EXPECT_EQ(options.outer, "allgather_kv");
  EXPECT_EQ(options.requested_cp_size, 4);
  EXPECT_EQ(options.layout->cp_rank, 1);
  EXPECT_EQ(options.kv_layout->cp_rank, 2);
  EXPECT_EQ(options.softcap, 30.5);
  EXPECT_EQ(options.mask_q, "local");
  EXPECT_EQ(options.mask_kv, "global");
  EXPECT_EQ(options.mask_type, "BlockMask");
  EXPECT_EQ(options.sinks_type, "list");
  EXPECT_EQ(options.joint_len, 7);
  EXPECT_EQ(options.joint_position, "suffix");
  EXPECT_EQ(options.joint_valid_lens, (std::vector<int64_t>{3, 0}));
  EXPECT_EQ(options.joint_problem, "joint.q is a=b");
  EXPECT_EQ(options.requested, (std::vector<Feature>{Feature::kWindow, Feature::kDropout}));
}

TEST(OptionsText, PolicyFieldsRoundTrip) {
  UlyssesContextParallelPolicy policy;
  policy.backend_name = "mine";
  policy.require_seq_divisible = false;
  policy.auto_pad = false;
  policy.pad_multiple = 1;
  policy.kv_must_be_global = false;
  policy.output_restore_dim = 2;
  policy.base_processor = "Other";
  policy.required_checks = {"seq_divisible"};
  EXPECT_EQ(policy_from_text("policy.backend_name=mine\npolicy.require_seq_divisible=0\npolicy.auto_pad=0\n"
                             "policy.pad_multiple=1\npolicy.kv_must_be_global=0\npolicy.output_restore_dim=2\n"
                             "policy.base_processor=Other\npolicy.required_checks=seq_divisible\n"),
            policy);
}

TEST(OptionsText, CP099_AnUnknownKeyIsABug) {
  try {
    options_from_text("strategi=ulysses\n");
    FAIL() << "accepted";
  } catch (const base::Error& error) {
    EXPECT_EQ(error.id(), "CP099");
    EXPECT_NE(std::string(error.what()).find("strategi=ulysses"), std::string::npos);
  }
}

TEST(OptionsText, SoftcapKeepsEveryBitAndWhatIsNoNumber) {
  EXPECT_EQ(options_from_text("softcap=0.10000000000000002\n").softcap, 0.10000000000000002);
  EXPECT_TRUE(std::isnan(*options_from_text("softcap=nan\n").softcap));  // refused by the rule, CP034
}

TEST(OptionsText, CP007_ANumberBeyond64BitsIsRefused) {
  try {
    policy_from_text("policy.pad_multiple=99999999999999999999\n");
    FAIL() << "accepted";
  } catch (const base::Error& error) {
    EXPECT_EQ(error.id(), "CP007");
    EXPECT_NE(std::string(error.what()).find("99999999999999999999"), std::string::npos);
  }
}

}  // namespace
}  // namespace ulysses::contract
