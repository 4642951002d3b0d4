// The doctor's questions as data: which cases there are, what they are called, and what they ask of an operation.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "ulysses/contract/capability.h"
#include "ulysses/doctor/cases.h"

namespace ulysses::doctor {
namespace {

using contract::Feature;

CaseSelection on(std::vector<int64_t> worlds, std::vector<std::string> dtypes = {"float32"}) {
  CaseSelection selection;
  selection.worlds = std::move(worlds);
  selection.dtypes = std::move(dtypes);
  return selection;
}

std::vector<std::string> ids(const CaseSelection& selection) {
  std::vector<std::string> found;
  for (const Case& c : make_cases(selection)) found.push_back(c.id());
  return found;
}

int64_t shortest(const std::vector<int64_t>& lengths) { return *std::min_element(lengths.begin(), lengths.end()); }

// Whether a case uses the feature whose row it is.
const std::map<Feature, bool (*)(const Case&)>& uses() {
  static const std::map<Feature, bool (*)(const Case&)> kUses = {
      {Feature::kEqualShards, [](const Case& c) { return c.has_even_shards() && c.num_heads % c.cp_size == 0; }},
      {Feature::kUnevenShards, [](const Case& c) { return c.lengths.front() != c.lengths[1] && !c.is_padded(); }},
      {Feature::kEmptyShards, [](const Case& c) { return shortest(c.lengths) == 0 && c.seq_len() > 0; }},
      {Feature::kPaddedShards, [](const Case& c) { return c.is_padded(); }},
      {Feature::kUnevenHeads, [](const Case& c) { return c.num_heads > c.cp_size && c.num_heads % c.cp_size != 0; }},
      {Feature::kGroupedKv, [](const Case& c) { return c.num_kv_heads < c.num_heads; }},
      {Feature::kFewerKvHeadsThanRanks, [](const Case& c) { return c.num_kv_heads < c.cp_size; }},
      {Feature::kFewerHeadsThanRanks, [](const Case& c) { return c.num_heads < c.cp_size; }},
      {Feature::kIsCausal, [](const Case& c) { return c.is_causal; }},
      {Feature::kBottomRightCausal,
       [](const Case& c) { return c.is_causal && c.bottom_right && c.kv_seq_len() != c.seq_len(); }},
      {Feature::kSoftmaxScale, [](const Case& c) { return c.softmax_scale != 0 && c.scale() == c.softmax_scale; }},
      {Feature::kReturnLse, [](const Case& c) { return c.return_lse; }},
      {Feature::kCrossLengths, [](const Case& c) { return c.kv_lengths != c.lengths; }},
      {Feature::kValueHeadDim, [](const Case& c) { return c.value_head_dim != c.head_dim; }},
      {Feature::kWindow, [](const Case& c) { return c.window > 0; }},
      {Feature::kAttnMask, [](const Case& c) { return c.mask.starts_with("key") && c.local_axis.empty(); }},
      {Feature::kQueryMask, [](const Case& c) { return c.mask == "query" || c.mask == "full"; }},
      {Feature::kHeadMask, [](const Case& c) { return c.mask == "head" || c.mask == "full"; }},
      {Feature::kAdditiveMask, [](const Case& c) { return !c.mask.empty() && c.additive_mask; }},
      {Feature::kShardedMask, [](const Case& c) { return !c.mask.empty() && !c.local_axis.empty(); }},
      {Feature::kMaskGradient, [](const Case& c) { return c.additive_mask && c.mask_grad && c.backward; }},
      {Feature::kReplicatedKv, [](const Case& c) { return c.replicated_kv; }},
      {Feature::kJointTokens, [](const Case& c) { return c.text_len > 0; }},
      {Feature::kJointSuffix, [](const Case& c) { return c.text_len > 0 && c.text_suffix; }},
      {Feature::kJointValidLens,
       [](const Case& c) { return std::ssize(c.text_lens) == c.batch && shortest(c.text_lens) < c.text_len; }},
      {Feature::kPackedSequences, [](const Case& c) { return c.num_documents > 1; }},
      {Feature::kDropout, [](const Case& c) { return c.dropout_p > 0; }},
      {Feature::kQkvFormat, [](const Case& c) { return c.qkv_format == "bhsd" || c.qkv_format == "sbhd"; }},
      {Feature::kSinks, [](const Case& c) { return c.sinks; }},
      {Feature::kSoftcap, [](const Case& c) { return c.softcap > 0; }},
      {Feature::kLseGradient, [](const Case& c) { return c.return_lse && c.lse_grad && c.backward; }},
      {Feature::kHybridDegree, [](const Case& c) { return c.ulysses_degree > 0; }},
      {Feature::kHeadTailOrder, [](const Case& c) { return c.order == "head_tail"; }},
  };
  return kUses;
}

TEST(DoctorCases, EveryFeatureHasACaseThatUsesIt) {
  for (const int64_t world : {2, 4}) {
    for (const bool quick : {true, false}) {
      CaseSelection selection = on({world});
      selection.quick = quick;
      std::map<std::string, int64_t> counts;
      for (const Case& c : make_cases(selection)) {
        const auto feature = contract::feature_from_string(c.feature);
        ASSERT_TRUE(feature.has_value()) << c.feature;
        EXPECT_TRUE(uses().at(*feature)(c)) << c.id();
        EXPECT_EQ(c.cp_size, world);
        counts[c.feature] += 1;
      }
      for (const Feature feature : contract::all_features())
        EXPECT_GE(counts[std::string(contract::to_string(feature))], 1) << contract::to_string(feature);
    }
  }
}

TEST(DoctorCases, EveryCaseIsOneForAnyNumberOfRanksAndHasAnIdOfItsOwn) {
  CaseSelection selection = on({1, 2, 3, 4, 5, 8}, {"float32", "bfloat16", "float16", "float64"});
  selection.strategies = {"", "ulysses", "allgather_kv"};
  std::set<std::string> seen;
  for (const Case& c : make_cases(selection)) {
    EXPECT_EQ(problem_of(c), "") << c.id();
    EXPECT_TRUE(seen.insert(c.id()).second) << c.id() << " twice";
  }
  EXPECT_GT(seen.size(), 6U * 3 * 4 * 23);
}

TEST(DoctorCases, AnIdNamesFeatureStrategyRanksDtypeAndShape) {
  EXPECT_EQ(plain_case(2, "").id(), "equal_shards/W2/float32/S16-H4-B2");
  EXPECT_EQ(plain_case(4, "ulysses").id(), "equal_shards/ulysses/W4/float32/S32-H4-B2");
  Case c = plain_case(2, "");
  c.feature = "cross_lengths";
  c.kv_lengths = {11, 12};
  c.num_kv_heads = 2, c.value_head_dim = 8, c.dtype = "bfloat16", c.magnitude = 100;
  c.is_causal = c.return_lse = c.strided = true;
  EXPECT_EQ(c.id(), "cross_lengths/W2/bfloat16/S16-H4:2-Skv23-Dv8-B2-causal-lse-strided-x100");
  c.bottom_right = true;
  EXPECT_EQ(c.id(), "cross_lengths/W2/bfloat16/S16-H4:2-Skv23-Dv8-B2-bottom_right-lse-strided-x100");
  Case extras = plain_case(2, "");
  extras.mask = "full", extras.additive_mask = extras.blind_rows = extras.mask_grad = true;
  extras.text_len = 6, extras.text_suffix = true, extras.text_lens = {6, 2};
  extras.sinks = extras.return_lse = extras.lse_grad = true;
  extras.softcap = 2.5, extras.qkv_format = "sbhd";
  EXPECT_EQ(
      extras.id(),
      "equal_shards/W2/float32/S16-H4-B2-lse-full_bias-blind-grad_mask-suffix6-real6_2-sinks-cap2.5-grad_lse-sbhd");
  extras = plain_case(2, "");
  extras.mask = "key", extras.local_axis = "kv", extras.text_len = 3;
  EXPECT_EQ(extras.id(), "equal_shards/W2/float32/S16-H4-B2-key_mask-local_kv-text3");
}

TEST(DoctorCases, ThePlainCaseHasHeadsThatItsRanksDivide) {
  const std::map<int64_t, int64_t> heads = {{1, 4}, {2, 4}, {3, 6}, {4, 4}, {5, 5}, {7, 7}, {8, 8}};
  for (const auto& [world, wanted] : heads) {
    EXPECT_EQ(plain_case(world, "").num_heads, wanted) << world;
    EXPECT_EQ(plain_case(world, "").num_kv_heads, wanted) << world;
  }
}

TEST(DoctorCases, AGlobSelectsByWholeId) {
  const auto with = [](const std::string& glob) {
    CaseSelection selection = on({2, 4});
    selection.glob = glob;
    return ids(selection);
  };
  using Ids = std::vector<std::string>;
  EXPECT_EQ(with("window/*"), (Ids{"window/W2/float32/S16-H4-B2", "window/W4/float32/S32-H4-B2"}));
  EXPECT_EQ(with("*ow/W2*"), (Ids{"window/W2/float32/S16-H4-B2"}));
  EXPECT_EQ(with("w?ndow/W?/*32/S16*"), (Ids{"window/W2/float32/S16-H4-B2"}));
  EXPECT_EQ(with("window/W2/float32/S16-H4-B2"), (Ids{"window/W2/float32/S16-H4-B2"}));
  EXPECT_EQ(with("window"), Ids{});
  EXPECT_EQ(with("indow/*"), Ids{});
  EXPECT_EQ(with("windo?w/*"), Ids{});
  EXPECT_EQ(with("*"), with(""));
  EXPECT_GT(with("*").size(), 2U * 23);
}

TEST(DoctorCases, QuickIsOneShapeAFeatureAndThePlainCallInBfloat16) {
  CaseSelection selection = on({2}, {"float32", "bfloat16", "float16", "float64"});
  selection.quick = true;
  std::vector<std::string> plain, others;
  for (const Case& c : make_cases(selection)) (c.feature == "equal_shards" ? plain : others).push_back(c.id());
  EXPECT_EQ(plain,
            (std::vector<std::string>{"equal_shards/W2/float32/S16-H4-B2", "equal_shards/W2/bfloat16/S16-H4-B2"}));
  EXPECT_EQ(others.size(), contract::all_features().size() - 1);
  for (const std::string& id : others) EXPECT_NE(id.find("/float32/"), std::string::npos) << id;
}

TEST(DoctorCases, FieldsThatMakeNoCaseAreNamed) {
  const std::vector<std::pair<void (*)(Case&), std::string>> faults = {
      {[](Case& c) { c.cp_size = 0; }, "cp_size=0 entries"},
      {[](Case& c) { c.lengths = {8}; }, "must have cp_size=2 entries"},
      {[](Case& c) { c.padded_lengths.push_back(8); }, "must have cp_size=2 entries"},
      {[](Case& c) { c.kv_lengths.clear(); }, "must have cp_size=2 entries"},
      {[](Case& c) { c.lengths[1] = -1; }, "rank 1"},
      {[](Case& c) { c.kv_lengths[0] = -1; }, "rank 0"},
      {[](Case& c) { c.padded_lengths[1] = 7; }, "longer than its padded length"},
      {[](Case& c) { c.batch = 0; }, "must be positive"},
      {[](Case& c) { c.num_documents = 0; }, "must be positive"},
      {[](Case& c) { c.num_kv_heads = 3; }, "num_heads=4 is no multiple of num_kv_heads=3"},
      {[](Case& c) { c.softcap = -1; }, "must not be negative"},
      {[](Case& c) { c.lse_grad = true; }, "lse_grad needs return_lse"},
      {[](Case& c) { c.mask = "rows"; }, "mask=rows is none of key, key_4d, query, head, full"},
      {[](Case& c) { c.blind_rows = true; }, "need a mask"},
      {[](Case& c) { c.mask = "key", c.mask_grad = true; }, "mask_grad needs additive_mask"},
      {[](Case& c) { c.mask = "key", c.local_axis = "q"; }, "local_axis=q is neither"},
      {[](Case& c) { c.mask = "key", c.local_axis = "kv", c.text_len = 3; }, "no rank has such an axis"},
      {[](Case& c) { c.mask = "key", c.local_axis = "kv", c.replicated_kv = true; }, "no rank has such an axis"},
      {[](Case& c) { c.text_suffix = true; }, "need text_len"},
      {[](Case& c) { c.text_len = 3, c.text_lens = {1}; }, "text_lens must be 2 numbers from 0 to 3"},
      {[](Case& c) {
         c.text_len = 3, c.text_lens = {1, 4};
       },
       "text_lens must be 2 numbers from 0 to 3"},
      {[](Case& c) { c.text_len = 3, c.num_documents = 2; }, "which document"},
  };
  EXPECT_EQ(problem_of(plain_case(2, "")), "");
  for (const auto& [spoil, words] : faults) {
    Case c = plain_case(2, "");
    spoil(c);
    EXPECT_NE(problem_of(c).find(words), std::string::npos) << "'" << problem_of(c) << "' has no '" << words << "'";
  }
}

TEST(DoctorCases, APlainCaseAsksForNoOption) {
  const contract::AttentionOptions options = options_of(plain_case(2, ""));
  EXPECT_FALSE(options.is_causal || options.return_lse || options.softmax_scale.has_value());
  EXPECT_FALSE(options.layout.has_value() || options.kv_layout.has_value());
  EXPECT_TRUE(options.requested.empty());
  EXPECT_EQ(options.strategy, "ulysses");
  EXPECT_EQ(options_of(plain_case(2, "allgather_kv")).strategy, "allgather_kv");
}

TEST(DoctorCases, FieldsBecomeOptionsOfTheSameName) {
  Case c = plain_case(2, "");
  c.is_causal = c.bottom_right = c.return_lse = c.replicated_kv = true;
  c.softmax_scale = 0.3, c.qkv_format = "bhsd";
  const contract::AttentionOptions options = options_of(c);
  EXPECT_TRUE(options.is_causal && options.return_lse);
  EXPECT_EQ(options.causal_alignment, "bottom_right");
  EXPECT_EQ(options.kv_role, "replicated");
  EXPECT_EQ(options.qkv_format, "bhsd");
  EXPECT_EQ(options.softmax_scale, std::optional(0.3));
  EXPECT_EQ(options.policy.output_restore_dim, 2);
  EXPECT_FALSE(options.layout.has_value() || options.softcap.has_value());
  c = plain_case(2, "");
  c.text_len = 6, c.text_suffix = true, c.text_lens = {6, 2}, c.softcap = 2, c.qkv_format = "sbhd";
  const contract::AttentionOptions joint = options_of(c);
  EXPECT_EQ(joint.joint_len, 6);
  EXPECT_EQ(joint.joint_position, "suffix");
  EXPECT_EQ(joint.joint_valid_lens, (std::vector<int64_t>{6, 2}));
  EXPECT_EQ(joint.softcap, std::optional(2.0));
  EXPECT_EQ(joint.policy.output_restore_dim, 0);
}

// Where a size has two readings on any rank, every rank must be told; where it has one, nobody is.
TEST(DoctorCases, AMasksAxesAreNamedWhereTheirSizesLeaveAChoice) {
  struct Row {
    void (*change)(Case&);
    std::string q, kv;
    bool ambiguous;
  };
  const std::vector<Row> rows = {
      {[](Case&) {}, "", "", false},
      {[](Case& c) { c.mask = "key"; }, "broadcast", "global", false},
      {[](Case& c) { c.mask = "query"; }, "global", "global", false},
      {[](Case& c) { c.mask = "full", c.local_axis = "q"; }, "local", "global", false},
      {[](Case& c) { c.mask = "head", c.local_axis = "kv"; }, "broadcast", "local", false},
      {[](Case& c) { c.mask = "key", c.batch = 8; }, "broadcast", "global", true},  // [8, 16]: 8 queries, or sequences
      {[](Case& c) { c.mask = "key", c.batch = 16; }, "broadcast", "global", true},
      {[](Case& c) { c.mask = "key_4d", c.batch = 16; }, "broadcast", "global", false},
      {[](Case& c) {
         c.mask = "key", set_shards(c, {5, 0});
       },
       "broadcast", "global", true},  // rank 0 has all keys
      {[](Case& c) {
         c.mask = "key_4d", set_shards(c, {4, 1});
       },
       "broadcast", "global", true},  // one row of rank 1
      {[](Case& c) {
         c.mask = "query", set_shards(c, {4, 1});
       },
       "global", "global", false},
      {[](Case& c) {
         c.mask = "query", c.local_axis = "q", set_shards(c, {4, 1});
       },
       "local", "global", true},
      {[](Case& c) {
         c.mask = "key", c.text_len = 3, set_shards(c, {5, 0});
       },
       "broadcast", "global", false},
      {[](Case& c) {
         c.mask = "query", c.replicated_kv = true, c.kv_lengths = {5, 0};
       },
       "global", "global", false},
  };
  for (const Row& row : rows) {
    Case c = plain_case(2, "");
    row.change(c);
    SCOPED_TRACE(c.id());
    ASSERT_EQ(problem_of(c), "");
    const MaskWords words = mask_words(c);
    EXPECT_EQ(words.q + " " + words.kv, row.q + " " + row.kv);
    EXPECT_EQ(words.ambiguous, row.ambiguous);
    EXPECT_EQ(options_of(c).mask_q, row.ambiguous ? row.q : "");
    EXPECT_EQ(options_of(c).mask_kv, row.ambiguous ? row.kv : "");
  }
}

TEST(DoctorCases, ALayoutIsPassedOnlyWhereShardsAreNotAllEqual) {
  const auto layouts = [](void (*change)(Case&)) {
    Case c = plain_case(2, "");
    change(c);
    const contract::AttentionOptions options = options_of(c);
    return std::pair(options.layout, options.kv_layout);
  };
  const auto [uneven, no_kv] = layouts([](Case& c) { set_shards(c, {9, 7}); });
  ASSERT_TRUE(uneven.has_value());
  EXPECT_EQ(uneven->lengths, (std::vector<int64_t>{9, 7}));
  EXPECT_FALSE(no_kv.has_value());
  const auto [padded, padded_kv] = layouts([](Case& c) { c.lengths = {8, 5}, c.kv_lengths = {8, 5}; });
  ASSERT_TRUE(padded.has_value());
  EXPECT_EQ(padded->padded_lengths, (std::vector<int64_t>{8, 8}));
  EXPECT_FALSE(padded_kv.has_value());
  const auto [q, kv] = layouts([](Case& c) { c.kv_lengths = {5, 5}; });
  ASSERT_TRUE(q.has_value() && kv.has_value());
  EXPECT_EQ(q->lengths, (std::vector<int64_t>{8, 8}));
  EXPECT_EQ(kv->lengths, (std::vector<int64_t>{5, 5}));
  EXPECT_TRUE(layouts([](Case& c) { c.order = "head_tail"; }).first.has_value());
  // Replicated keys have no shards.
  const auto [even, none] = layouts([](Case& c) { c.replicated_kv = true, c.kv_lengths = {5, 5}; });
  EXPECT_FALSE(even.has_value() || none.has_value());
  const auto [uneven_q, no_keys] = layouts([](Case& c) { set_shards(c, {9, 7}), c.replicated_kv = true; });
  EXPECT_TRUE(uneven_q.has_value() && !no_keys.has_value());
}

TEST(DoctorCases, WhatTheOperationHasNoArgumentForIsRequestedByName) {
  const std::vector<std::pair<void (*)(Case&), Feature>> asked = {
      {[](Case& c) { c.window = 3; }, Feature::kWindow},
      {[](Case& c) { c.num_documents = 2; }, Feature::kPackedSequences},
      {[](Case& c) { c.dropout_p = 0.5; }, Feature::kDropout},
      {[](Case& c) { c.ulysses_degree = 2; }, Feature::kHybridDegree},
  };
  for (const auto& [change, feature] : asked) {
    Case c = plain_case(2, "");
    change(c);
    EXPECT_EQ(options_of(c).requested, std::vector{feature}) << contract::to_string(feature);
  }
}

}  // namespace
}  // namespace ulysses::doctor
