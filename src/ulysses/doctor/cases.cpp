#include "ulysses/doctor/cases.h"

#include <algorithm>
#include <array>

#include "ulysses/contract/capability.h"
#include "ulysses/partition/sequence_layout.h"

namespace ulysses::doctor {
namespace {

using contract::Feature;

// A shape in which a feature is used. `shape` changes the plain case; the first of a feature is the quick one.
struct Shape {
  Feature feature;
  void (*shape)(Case&);
};

// 6, 9, 8, 7, …: no two neighbours alike, an odd total for two ranks.
void set_uneven(Case& c) {
  std::vector<int64_t> lengths;
  for (int64_t rank = 0; rank < c.cp_size; ++rank) lengths.push_back(6 + (rank * 3) % 4);
  set_shards(c, lengths);
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
      {Feature::kAttnMask, [](Case& c) { c.masked_keys = 5; }},
      {Feature::kReplicatedKv,
       [](Case& c) {
         c.kv_lengths.assign(static_cast<size_t>(c.cp_size), 3);
         c.replicated_kv = true;
       }},
      {Feature::kJointTokens, [](Case& c) { c.text_len = 6; }},
      {Feature::kPackedSequences, [](Case& c) { c.num_documents = 2; }},
      {Feature::kDropout, [](Case& c) { c.dropout_p = 0.5; }},
      {Feature::kQkvFormat, [](Case& c) { c.qkv_format = "bhsd"; }},
      {Feature::kHybridDegree, [](Case& c) { c.ulysses_degree = 2; }},
      {Feature::kHeadTailOrder, [](Case& c) { c.order = "head_tail"; }},
});

// "*" and "?" as in a shell, over the whole text.
bool matches(std::string_view glob, std::string_view text) {
  size_t g = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (g < glob.size() && (glob[g] == '?' || glob[g] == text[t]) && glob[g] != '*') {
      ++g, ++t;
    } else if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = t;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

}  // namespace

Case plain_case(int64_t cp_size, const std::string& strategy) {
  Case c;
  c.cp_size = cp_size;
  c.strategy = strategy;
  const int64_t num_heads = (4 + cp_size - 1) / cp_size * cp_size;  // 4, or more where 4 is no multiple
  set_heads(c, num_heads, num_heads);
  set_shards(c, 8);
  return c;
}

std::vector<std::string> strategies_of(const CaseSelection& selection) {
  return selection.strategies.empty() ? std::vector<std::string>{""} : selection.strategies;
}

std::vector<Case> make_cases(const CaseSelection& selection) {
  std::vector<Case> cases;
  for (const int64_t cp_size : selection.worlds) {
    for (const std::string& strategy : strategies_of(selection)) {
      const Shape* previous = nullptr;
      for (const Shape& row : kShapes) {
        const bool first = previous == nullptr || previous->feature != row.feature;
        previous = &row;
        if (selection.quick && !first) continue;
        Case c = plain_case(cp_size, strategy);
        c.feature = contract::to_string(row.feature);
        row.shape(c);
        if (cp_size == 1 && (c.num_heads < 1 || c.num_kv_heads < 1)) continue;  // no fewer heads than one rank
        for (const std::string& dtype : selection.dtypes) {
          c.dtype = dtype;
          const bool is_plain = row.feature == Feature::kEqualShards && dtype == "bfloat16";
          if (selection.quick && dtype != "float32" && !is_plain) continue;
          if (selection.glob.empty() || matches(selection.glob, c.id())) cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

}  // namespace ulysses::doctor
