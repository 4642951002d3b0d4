#pragma once

#include <optional>
#include <span>
#include <string_view>

namespace ulysses::contract {

// Things a caller can ask of a strategy. The rows of the capability table.
enum class Feature {
  kEqualShards,
  kUnevenShards,
  kEmptyShards,
  kPaddedShards,
  kUnevenHeads,
  kGroupedKv,
  kFewerKvHeadsThanRanks,
  kFewerHeadsThanRanks,
  kIsCausal,
  kBottomRightCausal,
  kSoftmaxScale,
  kReturnLse,
  kCrossLengths,
  kValueHeadDim,
  kWindow,
  kAttnMask,
  kQueryMask,
  kHeadMask,
  kAdditiveMask,
  kShardedMask,
  kMaskGradient,
  kReplicatedKv,
  kJointTokens,
  kJointSuffix,
  kJointValidLens,
  kPackedSequences,
  kDropout,
  kQkvFormat,
  kSinks,
  kSoftcap,
  kLseGradient,
  kHybridDegree,
  kHeadTailOrder,
};

enum class Support { kSupported, kRefused };

// One cell: what a strategy does with a feature. The operation's refusals, the guide and the printed table all read
// this and nothing else.
struct Capability {
  std::string_view strategy;
  Feature feature;
  Support support;
  std::string_view id;     // error id when refused, else ""
  std::string_view note;   // supported: how it is resolved; refused: what to use instead
  std::string_view peers;  // refused: what the other libraries that were looked at do, else ""
};

std::string_view to_string(Feature feature);
std::optional<Feature> feature_from_string(std::string_view name);
std::span<const Feature> all_features();
std::span<const std::string_view> known_strategies();
std::span<const Capability> capability_table();
const Capability& capability(std::string_view strategy, Feature feature);

}  // namespace ulysses::contract
