#include <algorithm>

#include "ulysses/contract/attention_facts.h"
#include "ulysses/contract/attention_spec.h"

namespace ulysses::contract {
namespace {

using base::Problem;

bool is_4d(const TensorSpec& tensor) {
  return tensor.sizes.size() == 4 &&
         std::all_of(tensor.sizes.begin(), tensor.sizes.end(), [](int64_t size) { return size >= 0; });
}

// The layout if its lists are legal and it is one of this group, else null.
const LayoutSpec* usable(const std::optional<LayoutSpec>& layout, int64_t cp_size) {
  if (!layout || static_cast<int64_t>(layout->lengths.size()) != cp_size) return nullptr;
  return check_layout_lists("layout", *layout) ? nullptr : &*layout;
}

// The usable layout of k and v.
const LayoutSpec* layout_of_keys(const AttentionSpec& spec, const LayoutSpec* q_layout) {
  if (spec.kv_role == "replicated") return nullptr;
  return spec.kv_layout ? usable(spec.kv_layout, spec.cp_size) : q_layout;
}

// The rank's own rows of a 4-D tensor; −1 where its joint tokens do not fit.
int64_t rows_beside_joint(const TensorSpec& tensor, int64_t joint_len) {
  return joint_len < 0 || joint_len > tensor.sizes[1] ? -1 : tensor.sizes[1] - joint_len;
}

void add_shard_features(const LayoutSpec& layout, std::vector<Feature>& features) {
  const auto& lengths = layout.lengths;
  const bool equal = std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) == lengths.end();
  features.push_back(equal ? Feature::kEqualShards : Feature::kUnevenShards);
  if (std::find(lengths.begin(), lengths.end(), 0) != lengths.end()) features.push_back(Feature::kEmptyShards);
  if (layout.padded_lengths != lengths) features.push_back(Feature::kPaddedShards);
  if (layout.order == "head_tail") features.push_back(Feature::kHeadTailOrder);
}

void add_head_features(const AttentionSpec& spec, std::vector<Feature>& features) {
  const int64_t heads = spec.q.sizes[2];
  const int64_t kv_heads = spec.k.sizes[2];
  if (spec.cp_size > 0 && heads % spec.cp_size != 0) features.push_back(Feature::kUnevenHeads);
  if (heads < spec.cp_size) features.push_back(Feature::kFewerHeadsThanRanks);
  if (kv_heads != heads) features.push_back(Feature::kGroupedKv);
  if (kv_heads < spec.cp_size) features.push_back(Feature::kFewerKvHeadsThanRanks);
}

void add_mask_features(const AttentionSpec& spec, std::vector<Feature>& features) {
  const TensorSpec& mask = *spec.attn_mask;
  features.push_back(Feature::kAttnMask);
  if (mask.is_floating) features.push_back(Feature::kAdditiveMask);
  if (mask.requires_grad) features.push_back(Feature::kMaskGradient);
  if (!is_4d(spec.q) || !is_4d(spec.k)) return;
  const MaskAxes axes = mask_axes(spec);
  if (axes.q != MaskAxis::kBroadcast) features.push_back(Feature::kQueryMask);
  if (mask.sizes.size() == 4 && mask.sizes[1] > 1) features.push_back(Feature::kHeadMask);
  if (axes.q == MaskAxis::kLocal || axes.kv == MaskAxis::kLocal) features.push_back(Feature::kShardedMask);
}

void add_joint_features(const AttentionSpec& spec, std::vector<Feature>& features) {
  features.push_back(Feature::kJointTokens);
  if (spec.joint_position == "suffix") features.push_back(Feature::kJointSuffix);
  if (!spec.joint_valid_lens.empty()) features.push_back(Feature::kJointValidLens);
}

bool lengths_cross(const AttentionSpec& spec) {
  if (spec.kv_role == "replicated") return false;
  if (spec.kv_layout) return !spec.layout || spec.layout->lengths != spec.kv_layout->lengths;
  return is_4d(spec.q) && is_4d(spec.k) && spec.q.sizes[1] != spec.k.sizes[1];
}

}  // namespace

CallFacts::CallFacts(const AttentionSpec& call)
    : spec(call),
      q_is_4d(is_4d(call.q)),
      k_is_4d(is_4d(call.k)),
      v_is_4d(is_4d(call.v)),
      group_is_legal(call.cp_size > 0 && call.cp_rank >= 0 && call.cp_rank < call.cp_size),
      q_layout(usable(call.layout, call.cp_size)),
      kv_layout(layout_of_keys(call, q_layout)) {
  if (q_is_4d) {
    batch = call.q.sizes[0];
    q_rows = rows_beside_joint(call.q, call.joint_len);
    num_heads = call.q.sizes[2];
    head_dim = call.q.sizes[3];
  }
  if (k_is_4d) {
    k_rows = rows_beside_joint(call.k, call.joint_len);
    num_kv_heads = call.k.sizes[2];
  }
  if (v_is_4d) v_head_dim = call.v.sizes[3];
}

std::vector<Feature> features_of(const AttentionSpec& spec) {
  std::vector<Feature> features = spec.requested;
  if (spec.layout) add_shard_features(*spec.layout, features);
  if (spec.kv_layout) add_shard_features(*spec.kv_layout, features);
  if (!spec.layout && !spec.kv_layout) {
    const bool uneven = spec.policy.sequence_mode() == SequenceMode::kUneven;
    features.push_back(uneven ? Feature::kUnevenShards : Feature::kEqualShards);
  }
  if (is_4d(spec.q) && is_4d(spec.k)) add_head_features(spec, features);
  if (is_4d(spec.q) && is_4d(spec.v) && spec.q.sizes[3] != spec.v.sizes[3]) features.push_back(Feature::kValueHeadDim);
  if (lengths_cross(spec)) features.push_back(Feature::kCrossLengths);
  if (spec.is_causal) features.push_back(Feature::kIsCausal);
  if (spec.causal_alignment == "bottom_right") features.push_back(Feature::kBottomRightCausal);
  if (spec.softmax_scale) features.push_back(Feature::kSoftmaxScale);
  if (spec.return_lse) features.push_back(Feature::kReturnLse);
  const bool trains = spec.q.requires_grad || spec.k.requires_grad || spec.v.requires_grad;
  if (spec.return_lse && trains) features.push_back(Feature::kLseGradient);
  if (spec.attn_mask) add_mask_features(spec, features);
  if (spec.joint_len > 0) add_joint_features(spec, features);
  if (spec.sinks) features.push_back(Feature::kSinks);
  if (spec.softcap) features.push_back(Feature::kSoftcap);
  if (spec.outer == "allgather_kv") features.push_back(Feature::kHybridDegree);  // it steers nothing else
  if (spec.kv_role == "replicated") features.push_back(Feature::kReplicatedKv);
  if (spec.qkv_format == "bhsd" || spec.qkv_format == "sbhd") features.push_back(Feature::kQkvFormat);
  std::sort(features.begin(), features.end());
  features.erase(std::unique(features.begin(), features.end()), features.end());
  return features;
}

std::vector<Problem> check_attention(const AttentionSpec& spec) {
  const CallFacts facts(spec);
  CallProblems problems;
  for (const auto rules : {sequence_rules(), tensor_rules(), mask_rules(), extra_rules(), option_rules()}) {
    for (const CallRule rule : rules) {
      for (Problem& problem : rule(facts)) problems.push_back(std::move(problem));
    }
  }
  std::stable_sort(problems.begin(), problems.end(), [](const Problem& a, const Problem& b) { return a.id < b.id; });
  return problems;
}

}  // namespace ulysses::contract
