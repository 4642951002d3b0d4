#include "ulysses/contract/capability.h"

#include <algorithm>
#include <array>

#include "ulysses/base/error.h"
#include "ulysses/contract/rules.h"

namespace ulysses::contract {
namespace {

constexpr std::array<std::string_view, 2> kStrategies = {"ulysses", "allgather_kv"};

// A feature with its name and its cell in each strategy's column.
struct Row {
  Feature feature;
  std::string_view name;
  std::array<Capability, kStrategies.size()> cells;
};

constexpr Row supported(Feature feature, std::string_view name, std::string_view by_ulysses,
                        std::string_view by_allgather_kv) {
  return {feature,
          name,
          {{{kStrategies[0], feature, Support::kSupported, "", by_ulysses, ""},
            {kStrategies[1], feature, Support::kSupported, "", by_allgather_kv, ""}}}};
}

// `peers`: of the versions in docs/peers.md. "measured" is a row there; the rest was read in their sources, and not
// run.
constexpr Row refused(Feature feature, std::string_view name, std::string_view id, std::string_view instead,
                      std::string_view peers) {
  return {feature,
          name,
          {{{kStrategies[0], feature, Support::kRefused, id, instead, peers},
            {kStrategies[1], feature, Support::kRefused, id, instead, peers}}}};
}

#ifdef ULYSSES_FLIP_CAPABILITY_FOR_TESTS
// One cell flipped: proves that operation, guide and table read this array and nothing else.
constexpr Row causal_row(Row row) {
  row.cells[0].support = Support::kRefused;
  row.cells[0].id = "CP041";
  row.cells[0].note = "is_causal=False";
  return row;
}
#else
constexpr Row causal_row(Row row) { return row; }
#endif

// In the order of the enum.
constexpr std::array kRows = {
    supported(Feature::kEqualShards, "equal_shards", "one all-to-all in, one out", "one all-gather of K/V"),
    supported(Feature::kUnevenShards, "uneven_shards", "exact splits, nothing padded",
              "exact row counts, nothing padded"),
    supported(Feature::kEmptyShards, "empty_shards", "the rank takes part with no rows",
              "the rank takes part with no rows"),
    supported(Feature::kPaddedShards, "padded_shards", "padding rows stay on their rank; they come back zero",
              "padding rows stay on their rank; they come back zero"),
    supported(Feature::kUnevenHeads, "uneven_heads", "head ranges balanced within one", "every rank has all heads"),
    supported(Feature::kGroupedKv, "grouped_kv",
              "each rank gets the KV heads its query heads read; K/V is never repeated",
              "K/V travels once, never repeated"),
    supported(Feature::kFewerKvHeadsThanRanks, "fewer_kv_heads_than_ranks",
              "ranks share a KV head; its gradient is summed", "every rank has all KV heads"),
    supported(Feature::kFewerHeadsThanRanks, "fewer_heads_than_ranks",
              "ranks without heads still join every collective", "every rank has all heads"),
    causal_row(supported(Feature::kIsCausal, "is_causal", "the whole sequence is local",
                         "full and diagonal blocks by global position")),
    refused(Feature::kBottomRightCausal, "bottom_right_causal", "CP048", "causal_alignment=\"top_left\"",
            "diffusers, yunchang, torch: no argument for it; DeepSpeed: left to the caller's local attention"),
    supported(Feature::kSoftmaxScale, "softmax_scale", "handed to the kernel", "handed to the kernel"),
    supported(Feature::kReturnLse, "return_lse", "of the local queries, all heads", "of the local queries, all heads"),
    supported(Feature::kCrossLengths, "cross_lengths", "kv_layout; q and k/v travel in two collectives", "kv_layout"),
    supported(Feature::kValueHeadDim, "value_head_dim", "a kernel that can (math)", "a kernel that can (math)"),
    refused(
        Feature::kWindow, "window", "CP041", "window=None (full attention)",
        "yunchang: window_size; diffusers: window_size of its flash backends; DeepSpeed: left to the caller's local "
        "attention; torch: by the block mask of flex attention"),
    supported(Feature::kAttnMask, "attn_mask", "handed to the kernel", "handed to the kernel"),
    supported(Feature::kQueryMask, "query_mask", "every row, for the whole sequence is local", "the rank's own rows"),
    supported(Feature::kHeadMask, "head_mask", "the rank's own heads", "every rank has all heads"),
    supported(Feature::kAdditiveMask, "additive_mask", "added to the scaled scores", "added to the scaled scores"),
    supported(Feature::kShardedMask, "sharded_mask", "gathered once for a mask that is used again",
              "a key axis is gathered once for a mask that is used again; a query axis stays"),
    supported(Feature::kMaskGradient, "mask_gradient", "partial: to be summed over the ranks; global axes only",
              "partial: to be summed over the ranks; global axes only"),
    supported(Feature::kReplicatedKv, "replicated_kv", "no communication; dK and dV are partial",
              "no communication; dK and dV are partial"),
    supported(Feature::kJointTokens, "joint_tokens", "never sent: only their output is, in the same all-to-all",
              "never sent; each rank attends for a share of them, one more gather"),
    supported(Feature::kJointSuffix, "joint_suffix", "behind the sequence", "behind the sequence"),
    supported(Feature::kJointValidLens, "joint_valid_lens", "cut, or masked where the batch differs",
              "cut, or masked where the batch differs"),
    refused(Feature::kPackedSequences, "packed_sequences", "CP045",
            "cu_seqlens_q=None and cu_seqlens_kv=None, with one call per sequence",
            "yunchang: cu_seqlens of its ring functions, not under Ulysses; DeepSpeed: position_ids that start again; "
            "torch: by the block mask of flex attention; diffusers: no"),
    refused(Feature::kDropout, "dropout", "CP042", "dropout_p=0.0 and dropout_seed=None",
            "yunchang, DeepSpeed, para-attn, torch: yes, measured; cache-dit: forward only, measured; diffusers: its "
            "gradients belong to other weights than the output, measured"),
    supported(Feature::kQkvFormat, "qkv_format", "bhsd and sbhd as views", "bhsd and sbhd as views"),
    supported(Feature::kSinks, "sinks", "merged by lse; the gradient is partial",
              "merged by lse; the gradient is partial"),
    supported(Feature::kSoftcap, "softcap", "a kernel that can (math)", "a kernel that can (math)"),
    supported(Feature::kLseGradient, "lse_gradient",
              "one more column of the gradient; a kernel that can (cpu_flash, math)",
              "a kernel that can (cpu_flash, math)"),
    refused(Feature::kHybridDegree, "hybrid_degree", "CP047", "ulysses_degree=None and outer=\"ring\" with a 1-D group",
            "diffusers, yunchang, cache-dit: yes; torch: ring only; DeepSpeed: Ulysses only"),
    refused(Feature::kHeadTailOrder, "head_tail_order", "CP049", "a layout with order=\"contiguous\"",
            "yunchang: ring_impl_type=\"zigzag\"; torch: on by default; diffusers, DeepSpeed: no"),
};

constexpr auto kFeatures = [] {
  std::array<Feature, kRows.size()> features{};
  for (size_t i = 0; i < kRows.size(); ++i) features[i] = kRows[i].feature;
  return features;
}();

// Strategy by strategy, each in the order of the features.
constexpr auto kTable = [] {
  std::array<Capability, kStrategies.size() * kRows.size()> table{};
  for (size_t s = 0; s < kStrategies.size(); ++s) {
    for (size_t i = 0; i < kRows.size(); ++i) table[s * kRows.size() + i] = kRows[i].cells[s];
  }
  return table;
}();

constexpr bool rows_follow_the_enum() {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<size_t>(kRows[i].feature) != i) return false;
  }
  return true;
}
static_assert(rows_follow_the_enum());
static_assert(kRows.size() == static_cast<size_t>(Feature::kHeadTailOrder) + 1);

}  // namespace

std::string_view to_string(Feature feature) { return kRows[static_cast<size_t>(feature)].name; }

std::optional<Feature> feature_from_string(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.feature;
  }
  return std::nullopt;
}

std::span<const Feature> all_features() { return kFeatures; }

std::span<const std::string_view> known_strategies() { return kStrategies; }

std::span<const Capability> capability_table() { return kTable; }

const Capability& capability(std::string_view strategy, Feature feature) {
  for (const Capability& cell : kTable) {
    if (cell.strategy == strategy && cell.feature == feature) return cell;
  }
  throw base::Error({unknown_word("CP030", "strategy", strategy, {kStrategies.begin(), kStrategies.end()})},
                    "capability");
}

}  // namespace ulysses::contract
