#include "ulysses/contract/capability.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "ulysses/base/error.h"

namespace ulysses::contract {
namespace {

TEST(CapabilityTable, HasOneCellPerStrategyAndFeature) {
  std::set<std::pair<std::string_view, Feature>> cells;
  for (const Capability& cell : capability_table()) cells.emplace(cell.strategy, cell.feature);
  EXPECT_EQ(cells.size(), capability_table().size());
  EXPECT_EQ(cells.size(), known_strategies().size() * all_features().size());
  EXPECT_EQ(all_features().size(), 33u);
}

TEST(CapabilityTable, EveryCellSaysHowOrWhatInstead) {
  for (const Capability& cell : capability_table()) {
    EXPECT_FALSE(cell.note.empty()) << to_string(cell.feature);
    EXPECT_EQ(cell.id.empty(), cell.support == Support::kSupported) << to_string(cell.feature);
    EXPECT_EQ(cell.peers.empty(), cell.support == Support::kSupported) << to_string(cell.feature);
  }
}

TEST(CapabilityTable, RefusesByTheRightId) {
  const std::map<Feature, std::string_view> refused = {
      {Feature::kBottomRightCausal, "CP048"}, {Feature::kWindow, "CP041"},       {Feature::kPackedSequences, "CP045"},
      {Feature::kDropout, "CP042"},           {Feature::kHybridDegree, "CP047"}, {Feature::kHeadTailOrder, "CP049"},
  };
  for (const std::string_view strategy : known_strategies()) {
    for (const Feature feature : all_features()) {
      const auto it = refused.find(feature);
      EXPECT_EQ(capability(strategy, feature).id, it == refused.end() ? "" : it->second) << to_string(feature);
    }
  }
}

TEST(CapabilityTable, SupportsWhatBelongsToMasksTextFormatsAndScores) {
  for (const std::string_view name :
       {"attn_mask", "query_mask", "head_mask", "additive_mask", "sharded_mask", "mask_gradient", "replicated_kv",
        "joint_tokens", "joint_suffix", "joint_valid_lens", "qkv_format", "sinks", "softcap", "lse_gradient"}) {
    const auto feature = feature_from_string(name);
    ASSERT_TRUE(feature) << name;
    for (const std::string_view strategy : known_strategies())
      EXPECT_EQ(capability(strategy, *feature).support, Support::kSupported) << strategy << ' ' << name;
  }
}

TEST(Capability, UnknownStrategyNamesTheKnownCP030) {
  try {
    capability("ulises", Feature::kIsCausal);
    FAIL();
  } catch (const base::Error& error) {
    EXPECT_EQ(error.id(), "CP030");
    EXPECT_NE(std::string(error.what()).find("Known: ulysses, allgather_kv. Fix: strategy=\"ulysses\""),
              std::string::npos)
        << error.what();
  }
}

TEST(FeatureNames, GoBothWays) {
  for (const Feature feature : all_features()) EXPECT_EQ(feature_from_string(to_string(feature)), feature);
  EXPECT_EQ(feature_from_string("no such feature"), std::nullopt);
  EXPECT_EQ(to_string(Feature::kHeadTailOrder), "head_tail_order");
}

}  // namespace
}  // namespace ulysses::contract
