#include <gtest/gtest.h>

#include "ulysses/contract/attention_spec.h"

namespace ulysses::contract {
namespace {

// The features of a call are what its cells of the capability table are read for.
TEST(FeaturesOf, ReadsTheCall) {
  AttentionSpec spec;
  spec.q.sizes = {2, 752, 6, 16};
  spec.k.sizes = spec.v.sizes = {2, 752, 2, 16};
  spec.cp_size = 4;
  EXPECT_EQ(features_of(spec), (std::vector<Feature>{Feature::kEqualShards, Feature::kUnevenHeads, Feature::kGroupedKv,
                                                     Feature::kFewerKvHeadsThanRanks}));
  spec.q.sizes[2] = spec.k.sizes[2] = 3;
  spec.v.sizes[3] = 8;
  spec.layout = LayoutSpec{{752, 7, 0, 0}, {752, 752, 752, 752}, {}};
  spec.kv_layout = LayoutSpec{{752, 1, 1, 1}, {752, 1, 1, 1}, {}};
  spec.is_causal = spec.return_lse = true;
  spec.softmax_scale = 1.0;
  spec.requested = {Feature::kDropout, Feature::kDropout};
  EXPECT_EQ(features_of(spec),
            (std::vector<Feature>{Feature::kUnevenShards, Feature::kEmptyShards, Feature::kPaddedShards,
                                  Feature::kUnevenHeads, Feature::kFewerKvHeadsThanRanks, Feature::kFewerHeadsThanRanks,
                                  Feature::kIsCausal, Feature::kSoftmaxScale, Feature::kReturnLse,
                                  Feature::kCrossLengths, Feature::kValueHeadDim, Feature::kDropout}));
}

}  // namespace
}  // namespace ulysses::contract
