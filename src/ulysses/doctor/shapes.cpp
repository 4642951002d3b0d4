#include "ulysses/doctor/shapes.h"

#include <array>

#include "ulysses/partition/sequence_layout.h"

namespace ulysses::doctor {
namespace {

using contract::Feature;

// 6, 9, 8, 7, …: no two neighbours alike, an odd total for two ranks.
void set_uneven(Case& c, bool keys_too = true) {
  const std::vector<int64_t> kv_lengths = c.kv_lengths;
  std::vector<int64_t> lengths;
  for (int64_t rank = 0; rank < c.cp_size; ++rank) lengths.push_back(6 + (rank * 3) % 4);
  set_shards(c, lengths);
  if (!keys_too) c.kv_lengths = kv_lengths;
}

// per_rank · cp_size keys, all of them on every rank.
void set_replicated(Case& c, int64_t per_rank) {
  c.kv_lengths.assign(static_cast<size_t>(c.cp_size), per_rank);
  c.replicated_kv = true;
}

// The whole sequence cut as SequenceLayout cuts it under the default policy: padding at its end.
void set_padded(Case& c, int64_t seq_len) {
  const partition::SequenceLayout layout(seq_len, c.cp_size);
  set_shards(c, layout.lengths());
  c.padded_lengths = layout.padded_lengths();
}

void set_heads(Case& c, int64_t num_heads, int64_t num_kv_heads) {
  c.num_heads = num_heads;
  c.num_kv_heads = num_kv_heads;
}

constexpr std::array kShapes = std::to_array<Shape>({
      {Feature::kEqualShards, [](Case&) {}},
      {Feature::kEqualShards,
       [](Case& c) {
         c.batch = 1;
         set_shards(c, 5);
       }},
      {Feature::kEqualShards, [](Case& c) { c.strided = true; }},
      {Feature::kEqualShards, [](Case& c) { c.magnitude = 100; }},
      {Feature::kEqualShards, [](Case& c) { c.backward = false; }},
      {Feature::kEqualShards, [](Case& c) { c.sum_loss = true; }},
      {Feature::kEqualShards, [](Case& c) { c.grad_of = "v"; }},
      {Feature::kEqualShards,
       [](Case& c) {
         c.batch = 3;
         c.head_dim = c.value_head_dim = 24;
       }},
      {Feature::kEqualShards, [](Case& c) { set_shards(c, 40); }},  // more than one block of any kernel
      {Feature::kUnevenShards, [](Case& c) { set_uneven(c); }},
      {Feature::kUnevenShards,
       [](Case& c) {
         set_uneven(c);
         c.batch = 1;
         c.is_causal = true;
         set_heads(c, 4 * c.cp_size, 2 * c.cp_size);
       }},
      {Feature::kUnevenShards,
       [](Case& c) {
         set_uneven(c);
         c.lengths.back() += 1;  // an odd total for four ranks
         set_shards(c, c.lengths);
         set_heads(c, 8, 2);
         c.is_causal = true;
       }},
      {Feature::kEmptyShards,
       [](Case& c) {
         std::vector<int64_t> lengths(static_cast<size_t>(c.cp_size), 0);
         lengths[0] = 5;
         set_shards(c, lengths);
       }},
      {Feature::kEmptyShards,
       [](Case& c) {
         std::vector<int64_t> lengths(static_cast<size_t>(c.cp_size), 4);
         lengths[0] = 0;
         set_shards(c, lengths);
         c.is_causal = true;
       }},
      {Feature::kPaddedShards, [](Case& c) { set_padded(c, 8 * c.cp_size - 3); }},
      {Feature::kPaddedShards,
       [](Case& c) {
         set_padded(c, 8 * c.cp_size - 1);
         set_heads(c, 6, 3);
       }},
      {Feature::kPaddedShards,
       [](Case& c) {
         set_padded(c, 8 * c.cp_size - 5);
         c.is_causal = true;
         c.return_lse = true;
       }},
      {Feature::kUnevenHeads, [](Case& c) { set_heads(c, c.cp_size + 1, c.cp_size + 1); }},
      {Feature::kUnevenHeads,
       [](Case& c) {
         set_heads(c, 2 * c.cp_size - 1, 2 * c.cp_size - 1);
         set_uneven(c);
       }},
      {Feature::kGroupedKv, [](Case& c) { set_heads(c, 4 * c.cp_size, 2 * c.cp_size); }},
      {Feature::kGroupedKv, [](Case& c) { set_heads(c, 6, 3); }},  // 2 and 4 ranks tear groups of two
      {Feature::kGroupedKv, [](Case& c) { set_heads(c, 12, 3); }},
      {Feature::kGroupedKv,
       [](Case& c) {
         set_heads(c, 4 * c.cp_size, 2 * c.cp_size);
         c.backward = false;
       }},
      {Feature::kFewerKvHeadsThanRanks, [](Case& c) { set_heads(c, 2 * c.cp_size, 1); }},
      {Feature::kFewerKvHeadsThanRanks, [](Case& c) { set_heads(c, 3 * (c.cp_size - 1), c.cp_size - 1); }},
      {Feature::kFewerHeadsThanRanks, [](Case& c) { set_heads(c, c.cp_size - 1, c.cp_size - 1); }},
      {Feature::kIsCausal, [](Case& c) { c.is_causal = true; }},
      {Feature::kIsCausal,
       [](Case& c) {
         c.is_causal = true;
         set_heads(c, 8, 2);
         set_uneven(c);
       }},
      {Feature::kIsCausal, [](Case& c) { c.is_causal = c.strided = true; }},
      {Feature::kIsCausal,
       [](Case& c) {
         c.is_causal = true;
         c.magnitude = 100;
       }},
      {Feature::kBottomRightCausal,
       [](Case& c) {
         c.is_causal = c.bottom_right = true;
         c.kv_lengths = std::vector<int64_t>(static_cast<size_t>(c.cp_size), 11);
       }},
      {Feature::kSoftmaxScale, [](Case& c) { c.softmax_scale = 0.3; }},
      {Feature::kSoftmaxScale,
       [](Case& c) {
         c.softmax_scale = 0.7;
         c.is_causal = true;
         set_heads(c, 4 * c.cp_size, 2 * c.cp_size);
       }},
      {Feature::kReturnLse, [](Case& c) { c.return_lse = true; }},
      {Feature::kReturnLse,
       [](Case& c) {
         c.return_lse = true;
         c.backward = false;
         c.softmax_scale = 0.7;
         set_heads(c, 6, 3);
         c.kv_lengths.assign(static_cast<size_t>(c.cp_size), 11);
       }},
      {Feature::kReturnLse,
       [](Case& c) {
         c.return_lse = c.is_causal = true;
         set_uneven(c);
         set_heads(c, 6, 2);
       }},
      {Feature::kCrossLengths,
       [](Case& c) {
         set_uneven(c);
         c.kv_lengths = std::vector<int64_t>(static_cast<size_t>(c.cp_size), 5);
       }},
      {Feature::kCrossLengths,
       [](Case& c) {
         c.is_causal = true;
         c.kv_lengths = std::vector<int64_t>(static_cast<size_t>(c.cp_size), 11);
       }},
      {Feature::kCrossLengths,
       [](Case& c) {
         c.kv_lengths.assign(static_cast<size_t>(c.cp_size), 9);
         c.kv_lengths[0] = 0;
       }},
      {Feature::kValueHeadDim, [](Case& c) { c.value_head_dim = 8; }},
      {Feature::kValueHeadDim, [](Case& c) { c.value_head_dim = 24; }},
      {Feature::kWindow, [](Case& c) { c.window = 3; }},
      {Feature::kAttnMask, [](Case& c) { c.mask = "key"; }},
      {Feature::kAttnMask,
       [](Case& c) {
         c.mask = "key_4d";
         set_uneven(c);
         set_heads(c, 6, 3);
       }},
      {Feature::kAttnMask,
       [](Case& c) {
         c.mask = "key";
         c.is_causal = true;
         set_padded(c, 8 * c.cp_size - 3);
       }},
      {Feature::kAttnMask,
       [](Case& c) {
         c.mask = "key";
         c.blind_rows = c.return_lse = true;
         set_batch(c, 3);
       }},
      {Feature::kQueryMask, [](Case& c) { c.mask = "query"; }},
      {Feature::kQueryMask,
       [](Case& c) {
         c.mask = "query";
         c.is_causal = c.return_lse = true;
         set_uneven(c);
         set_heads(c, 8, 2);
       }},
      {Feature::kQueryMask,
       [](Case& c) {
         c.mask = "query";
         c.blind_rows = c.return_lse = c.lse_grad = true;
         c.kv_lengths.assign(static_cast<size_t>(c.cp_size), 11);
       }},
      {Feature::kHeadMask, [](Case& c) { c.mask = "head"; }},
      {Feature::kHeadMask,
       [](Case& c) {
         c.mask = "full";
         set_heads(c, 6, 3);
         set_uneven(c);
       }},
      {Feature::kHeadMask,
       [](Case& c) {
         c.mask = "head";
         c.blind_rows = c.return_lse = true;
       }},
      {Feature::kAdditiveMask, [](Case& c) { c.mask = "full", c.additive_mask = true; }},
      {Feature::kAdditiveMask,
       [](Case& c) {
         c.mask = "key", c.additive_mask = c.is_causal = true;
         set_heads(c, 4 * c.cp_size, 2 * c.cp_size);
       }},
      {Feature::kAdditiveMask,
       [](Case& c) {
         c.mask = "query", c.additive_mask = c.blind_rows = true;
         set_padded(c, 8 * c.cp_size - 3);
       }},
      {Feature::kShardedMask, [](Case& c) { c.mask = "key", c.local_axis = "kv"; }},
      {Feature::kShardedMask, [](Case& c) { c.mask = "query", c.local_axis = "q"; }},
      {Feature::kShardedMask,
       [](Case& c) {
         c.mask = "full", c.local_axis = "kv";
         set_uneven(c);
         set_heads(c, 6, 3);
       }},
      {Feature::kShardedMask,
       [](Case& c) {
         c.mask = "full", c.local_axis = "q";
         c.additive_mask = c.is_causal = true;
         set_padded(c, 8 * c.cp_size - 3);
       }},
      {Feature::kMaskGradient, [](Case& c) { c.mask = "full", c.additive_mask = c.mask_grad = true; }},
      {Feature::kMaskGradient,
       [](Case& c) {
         c.mask = "key", c.additive_mask = c.mask_grad = c.is_causal = true;
         set_uneven(c);
       }},
      {Feature::kMaskGradient,
       [](Case& c) {
         c.mask = "query", c.additive_mask = c.mask_grad = true;
         c.return_lse = c.lse_grad = true;
         set_heads(c, 6, 3);
       }},
      {Feature::kMaskGradient,
       [](Case& c) {
         c.mask = "query", c.additive_mask = c.mask_grad = true;  // one mask for sequences whose text ends differently
         c.text_len = 4, c.text_lens = {4, 1};
       }},
      {Feature::kReplicatedKv, [](Case& c) { set_replicated(c, 3); }},
      {Feature::kReplicatedKv,
       [](Case& c) {
         set_replicated(c, 3);
         set_uneven(c, /*keys_too=*/false);
         set_heads(c, 6, 3);
         c.return_lse = c.lse_grad = true;
       }},
      {Feature::kReplicatedKv,
       [](Case& c) {
         set_replicated(c, 7);
         c.mask = "key";
         c.value_head_dim = 24;
       }},
      {Feature::kJointTokens, [](Case& c) { c.text_len = 6; }},
      {Feature::kJointTokens,
       [](Case& c) {
         c.text_len = 5;
         c.is_causal = true;
         set_uneven(c);
         set_heads(c, 6, 3);
       }},
      {Feature::kJointTokens,
       [](Case& c) {
         c.text_len = 3;
         c.return_lse = c.lse_grad = true;
         set_padded(c, 8 * c.cp_size - 3);
         set_heads(c, 4 * c.cp_size, 2 * c.cp_size);
       }},
      {Feature::kJointTokens, [](Case& c) { c.text_len = 6, c.mask = "full"; }},
      // Only a causal mask tells behind from in front.
      {Feature::kJointSuffix, [](Case& c) { c.text_len = 6, c.text_suffix = c.is_causal = true; }},
      {Feature::kJointSuffix, [](Case& c) { c.text_len = 6, c.text_suffix = true; }},
      {Feature::kJointValidLens, [](Case& c) { c.text_len = 6, c.text_lens = {6, 2}; }},
      {Feature::kJointValidLens,
       [](Case& c) {
         c.text_len = 6, c.text_lens = {0, 4};
         c.text_suffix = c.is_causal = c.return_lse = true;
         c.mask = "key";
       }},
      {Feature::kJointValidLens,
       [](Case& c) {
         c.text_len = 6, c.text_lens = {4, 4};  // one end: the tokens behind it can be cut off
         c.sinks = c.return_lse = true;
         set_uneven(c);
       }},
      {Feature::kJointValidLens,
       [](Case& c) {
         c.text_len = 6, c.text_lens = {4, 4};  // but not under a mask, which covers them
         c.mask = "full";
       }},
      {Feature::kPackedSequences, [](Case& c) { c.num_documents = 2; }},
      {Feature::kDropout, [](Case& c) { c.dropout_p = 0.5; }},
      {Feature::kQkvFormat, [](Case& c) { c.qkv_format = "bhsd"; }},
      {Feature::kQkvFormat, [](Case& c) { c.qkv_format = "sbhd"; }},
      {Feature::kQkvFormat,
       [](Case& c) {
         c.qkv_format = "sbhd";
         c.is_causal = c.return_lse = true;
         set_padded(c, 8 * c.cp_size - 3);
         set_heads(c, 6, 3);
       }},
      {Feature::kQkvFormat,
       [](Case& c) {
         c.qkv_format = "bhsd";
         c.text_len = 5;
         c.mask = "query";
       }},
      {Feature::kSinks, [](Case& c) { c.sinks = true; }},
      {Feature::kSinks,
       [](Case& c) {
         c.sinks = c.is_causal = c.return_lse = c.lse_grad = true;
         set_uneven(c);
         set_heads(c, 6, 3);
       }},
      {Feature::kSinks,
       [](Case& c) {
         c.sinks = c.blind_rows = c.return_lse = true;
         c.mask = "query";
       }},
      {Feature::kSoftcap, [](Case& c) { c.softcap = 2; }},
      {Feature::kSoftcap,
       [](Case& c) {
         c.softcap = 5;
         c.mask = "full", c.additive_mask = c.is_causal = true;
         set_heads(c, 4 * c.cp_size, 2 * c.cp_size);
       }},
      {Feature::kLseGradient, [](Case& c) { c.return_lse = c.lse_grad = true; }},
      {Feature::kLseGradient,
       [](Case& c) {
         c.return_lse = c.lse_grad = c.is_causal = true;
         set_uneven(c);
         set_heads(c, 6, 2);
       }},
      {Feature::kLseGradient,
       [](Case& c) {
         c.return_lse = c.lse_grad = true;
         c.softmax_scale = 0.7;
         c.kv_lengths.assign(static_cast<size_t>(c.cp_size), 11);
       }},
      {Feature::kHybridDegree, [](Case& c) { c.ulysses_degree = 2; }},
      {Feature::kHeadTailOrder, [](Case& c) { c.order = "head_tail"; }},
});

}  // namespace

std::span<const Shape> all_shapes() { return kShapes; }

}  // namespace ulysses::doctor
