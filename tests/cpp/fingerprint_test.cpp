#include "ulysses/contract/fingerprint.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace ulysses::contract {
namespace {

using Texts = std::vector<std::string>;

AttentionSpec call(int64_t rank) {
  AttentionSpec spec;
  spec.q = {.sizes = {2, 750, 8, 16}, .dtype = "float32", .device = "cuda:" + std::to_string(rank)};
  spec.k = {.sizes = {2, 750, 4, 16}, .dtype = "float32", .device = spec.q.device};
  spec.v = spec.k;
  spec.cp_size = 4;
  spec.cp_rank = rank;
  return spec;
}

std::string text_of(const AttentionSpec& spec, int64_t mask = 7) {
  return fingerprint_text(fingerprint_fields(spec, mask));
}

Texts group(const std::function<void(AttentionSpec&, int64_t)>& change) {
  Texts texts;
  for (int64_t rank = 0; rank < 4; ++rank) {
    AttentionSpec spec = call(rank);
    change(spec, rank);
    texts.push_back(text_of(spec));
  }
  return texts;
}

TEST(CompareFingerprints, EqualCallsAgreeWhateverTheRank) {
  EXPECT_TRUE(compare_fingerprints(group([](AttentionSpec&, int64_t) {})).empty());
  EXPECT_TRUE(compare_fingerprints({}).empty());
  EXPECT_TRUE(compare_fingerprints({"anything"}).empty());
}

TEST(CompareFingerprints, NamesRanksFieldAndBothValuesCP060) {
  const auto problems = compare_fingerprints(group([](AttentionSpec& spec, int64_t rank) {
    if (rank == 2) spec.q.sizes[2] = 6;
  }));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].id, "CP060");
  EXPECT_EQ(problems[0].kind, base::ErrorKind::kRankMismatch);
  EXPECT_EQ(problems[0].what, "ranks disagree on num_heads: rank 0 has 8 (so have ranks 1, 3), rank 2 has 6");
  EXPECT_EQ(problems[0].fix, "the same num_heads on every rank");
}

TEST(CompareFingerprints, EveryFieldThatMustAgreeIsCompared) {
  using Change = std::function<void(AttentionSpec&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"op", [](auto& s) { s.op = "x"; }},
      {"cp_size", [](auto& s) { s.cp_size = 2; }},
      {"batch", [](auto& s) { s.q.sizes[0] = 1; }},
      {"num_kv_heads", [](auto& s) { s.k.sizes[2] = 2; }},
      {"head_dim", [](auto& s) { s.q.sizes[3] = 8; }},
      {"v_head_dim", [](auto& s) { s.v.sizes[3] = 8; }},
      {"dtype", [](auto& s) { s.q.dtype = "bfloat16"; }},
      {"device_type", [](auto& s) { s.q.device = "cpu"; }},
      {"strategy", [](auto& s) { s.strategy = "allgather_kv"; }},
      {"kernel", [](auto& s) { s.kernel = "math"; }},
      {"agreement", [](auto& s) { s.agreement = "off"; }},
      {"qkv_format", [](auto& s) { s.qkv_format = "bhsd"; }},
      {"kv_role", [](auto& s) { s.kv_role = "x"; }},
      {"causal_alignment", [](auto& s) { s.causal_alignment = "bottom_right"; }},
      {"outer", [](auto& s) { s.outer = "allgather_kv"; }},
      {"is_causal", [](auto& s) { s.is_causal = true; }},
      {"return_lse", [](auto& s) { s.return_lse = true; }},
      {"softmax_scale", [](auto& s) { s.softmax_scale = 0.25; }},
      {"requested", [](auto& s) { s.requested = {Feature::kDropout}; }},
      {"policy.backend_name", [](auto& s) { s.policy.backend_name = "x"; }},
      {"policy.auto_pad", [](auto& s) { s.policy.auto_pad = false; }},
      {"policy.pad_multiple", [](auto& s) { s.policy.pad_multiple = 4; }},
      {"policy.kv_must_be_global", [](auto& s) { s.policy.kv_must_be_global = false; }},
      {"policy.output_restore_dim", [](auto& s) { s.policy.output_restore_dim = 2; }},
      {"policy.base_processor", [](auto& s) { s.policy.base_processor = "x"; }},
      {"policy.required_checks", [](auto& s) { s.policy.required_checks.clear(); }},
      {"policy.require_seq_divisible", [](auto& s) { s.policy.require_seq_divisible = false; }},
      {"layout",
       [](auto& s) {
         s.layout = LayoutSpec{{750, 750, 750, 750}, {750, 750, 750, 750}, {}};
       }},
      {"kv_layout",
       [](auto& s) {
         s.kv_layout = LayoutSpec{{750, 750, 750, 750}, {750, 750, 750, 750}, {}};
       }},
  };
  for (const auto& [name, change] : changes) {
    const auto problems = compare_fingerprints(group([&](AttentionSpec& spec, int64_t rank) {
      if (rank == 3) change(spec);
    }));
    ASSERT_EQ(problems.size(), 1u) << name;
    EXPECT_EQ(problems[0].id, "CP060");
    EXPECT_EQ(problems[0].what.rfind("ranks disagree on " + name + ": rank 0 has ", 0), 0u) << problems[0].what;
    EXPECT_NE(problems[0].what.find("rank 3 has "), std::string::npos);
  }
}

// On top of a call that has all of them, so that one field alone differs.
void add_extras(AttentionSpec& spec) {
  spec.attn_mask = TensorSpec{{2, 8, 3001, 3001}, "float32", "cpu"};
  spec.sinks = TensorSpec{{8}, "float32", "cpu"};
  spec.softcap = 30.0;
  spec.joint_len = 1;
  spec.joint_valid_lens = {0, 1};
  for (TensorSpec* tensor : {&spec.q, &spec.k, &spec.v}) ++tensor->sizes[1];
}

TEST(CompareFingerprints, WhatMasksTextAndScoresAddIsCompared) {
  using Change = std::function<void(AttentionSpec&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"attn_mask.dtype", [](auto& s) { s.attn_mask->dtype = "bool"; }},
      {"attn_mask.batch", [](auto& s) { s.attn_mask->sizes[0] = 1; }},
      {"attn_mask.num_heads", [](auto& s) { s.attn_mask->sizes[1] = 1; }},
      {"attn_mask.axes", [](auto& s) { s.attn_mask->sizes[2] = 1; }},
      {"attn_mask.is_gathered", [](auto& s) { s.mask_is_gathered = true; }},
      {"sinks", [](auto& s) { s.sinks->dtype = "bfloat16"; }},
      {"softcap", [](auto& s) { s.softcap = 30.000000000000004; }},
      {"joint.position", [](auto& s) { s.joint_position = "suffix"; }},
      {"joint.valid_lens",
       [](auto& s) {
         s.joint_valid_lens = {1, 0};
       }},
  };
  for (const auto& [name, change] : changes) {
    const auto problems = compare_fingerprints(group([&](AttentionSpec& spec, int64_t rank) {
      add_extras(spec);
      if (rank == 3) change(spec);
    }));
    ASSERT_EQ(problems.size(), 1u) << name;
    EXPECT_EQ(problems[0].id, "CP060");
    EXPECT_EQ(problems[0].what.rfind("ranks disagree on " + name + ": rank 0 has ", 0), 0u) << problems[0].what;
  }
}

TEST(CompareFingerprints, WhatOneRankAloneHasIsNamed) {
  using Change = std::function<void(AttentionSpec&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"attn_mask.dtype", [](auto& s) { s.attn_mask.reset(); }},
      {"sinks", [](auto& s) { s.sinks.reset(); }},
      {"softcap", [](auto& s) { s.softcap.reset(); }},
      {"joint.valid_lens", [](auto& s) { s.joint_valid_lens.clear(); }},
  };
  for (const auto& [name, change] : changes) {
    const auto problems = compare_fingerprints(group([&](AttentionSpec& spec, int64_t rank) {
      add_extras(spec);
      if (rank == 3) change(spec);
    }));
    ASSERT_FALSE(problems.empty()) << name;
    EXPECT_EQ(problems[0].id, "CP060");
    bool named = false;
    for (const auto& problem : problems)
      named = named || problem.what.find(name + ": rank 0 has ") != std::string::npos;
    EXPECT_TRUE(named) << name << ": " << problems[0].what;
  }
}

TEST(CompareFingerprints, RowsOfAShardedMaskMayDifferAndItsAxesMayNot) {
  const auto with_mask = [](AttentionSpec& spec, int64_t rank) {
    spec.layout = LayoutSpec{{750, 750, 750, 700}, {750, 750, 750, 700}, {}};
    if (rank == 3) spec.q.sizes[1] = spec.k.sizes[1] = spec.v.sizes[1] = 700;
    spec.attn_mask = TensorSpec{{2, spec.q.sizes[1]}, "bool", "cpu", /*is_floating=*/false};
  };
  EXPECT_TRUE(compare_fingerprints(group(with_mask)).empty());
  const auto problems = compare_fingerprints(group([&](AttentionSpec& spec, int64_t rank) {
    with_mask(spec, rank);
    if (rank == 1) spec.attn_mask->sizes[1] = 2950;
  }));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].what,
            "ranks disagree on attn_mask.axes: rank 0 has broadcast, local (so have ranks 2, 3), rank 1 has broadcast, "
            "global");
}

TEST(CompareFingerprints, ReplicatedKeysHaveOneLengthOnEveryRank) {
  const auto problems = compare_fingerprints(group([](AttentionSpec& spec, int64_t rank) {
    spec.kv_role = "replicated";
    spec.policy.require_seq_divisible = false;  // which says nothing about keys that are not sharded
    spec.k.sizes[1] = spec.v.sizes[1] = rank == 2 ? 76 : 77;
  }));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].id, "CP060");
  EXPECT_EQ(problems[0].what,
            "ranks disagree on kv_role: rank 0 has replicated, S_kv=77 (so have ranks 1, 3), rank 2 has replicated, "
            "S_kv=76");
}

TEST(CompareFingerprints, SoftmaxScaleToTheLastBit) {
  AttentionSpec a = call(0), b = call(1);
  a.softmax_scale = 0.1;
  b.softmax_scale = 0.1 + 1e-17 * 2;
  EXPECT_EQ(a.softmax_scale == b.softmax_scale, compare_fingerprints({text_of(a), text_of(b)}).empty());
  b.softmax_scale = 0.10000000000000002;
  EXPECT_EQ(compare_fingerprints({text_of(a), text_of(b)}).size(), 1u);
}

TEST(CompareFingerprints, RequiresGradIsCompared) {
  const auto problems = compare_fingerprints({text_of(call(0), 7), text_of(call(1), 5)});
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].what, "ranks disagree on requires_grad: rank 0 has q, k, v, rank 1 has q, v");
  EXPECT_EQ(compare_fingerprints({text_of(call(0), 31), text_of(call(1), 7)})[0].what,
            "ranks disagree on requires_grad: rank 0 has q, k, v, attn_mask, sinks, rank 1 has q, k, v");
}

TEST(CompareFingerprints, UnequalLocalLengthsListAllCP013) {
  const auto shorten = [](AttentionSpec& spec, int64_t rank) {
    if (rank == 3) spec.q.sizes[1] = spec.k.sizes[1] = spec.v.sizes[1] = 749;
    if (rank == 0) spec.q.sizes[1] = spec.k.sizes[1] = spec.v.sizes[1] = 751;
  };
  auto problems = compare_fingerprints(group(shorten));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].id, "CP013");
  EXPECT_EQ(problems[0].what, "local lengths of q differ without a layout: [751, 750, 750, 749] by rank");
  EXPECT_EQ(problems[0].fix,
            "layout=SequenceLayout.from_lengths([751, 750, 750, 749]), or require_seq_divisible=False");

  // Both fixes work.
  EXPECT_TRUE(compare_fingerprints(group([&](AttentionSpec& spec, int64_t rank) {
                shorten(spec, rank);
                spec.policy.require_seq_divisible = false;
              })).empty());
  EXPECT_TRUE(compare_fingerprints(group([&](AttentionSpec& spec, int64_t rank) {
                shorten(spec, rank);
                spec.layout = LayoutSpec{{751, 750, 750, 749}, {751, 750, 750, 749}, rank};
              })).empty());

  // A strict policy would refuse a layout of 3000 tokens, so the fix does not name it.
  problems = compare_fingerprints(group([&](AttentionSpec& spec, int64_t rank) {
    shorten(spec, rank);
    spec.policy.auto_pad = false;
  }));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].fix, "require_seq_divisible=False");
}

TEST(CompareFingerprints, KeysOfOtherLengthsCP013) {
  const auto problems =
      compare_fingerprints(group([](AttentionSpec& spec, int64_t rank) { spec.k.sizes[1] = 77 + rank; }));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].id, "CP013");
  EXPECT_EQ(problems[0].what, "local lengths of k and v differ without a layout: [77, 78, 79, 80] by rank");
  EXPECT_EQ(problems[0].fix.rfind("kv_layout=SequenceLayout.from_lengths([77, 78, 79, 80])", 0), 0u);
}

TEST(CompareFingerprints, LayoutsAreComparedButNotTheirOwnRank) {
  const auto with_layout = [](std::vector<int64_t> lengths) {
    return [lengths](AttentionSpec& spec, int64_t rank) {
      spec.layout = LayoutSpec{lengths, {752, 752, 752, 752}, rank};
      spec.q.sizes[1] = 700 + rank;  // not compared under a layout
      if (rank == 1 && lengths[3] == 700) spec.layout->lengths[3] = 701;
    };
  };
  EXPECT_TRUE(compare_fingerprints(group(with_layout({752, 752, 752, 744}))).empty());
  const auto problems = compare_fingerprints(group(with_layout({752, 752, 752, 700})));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_NE(problems[0].what.find("rank 1 has lengths [752, 752, 752, 701], padded [752, 752, 752, 752]"),
            std::string::npos)
      << problems[0].what;
}

TEST(CompareFingerprints, AFailedRankIsRaisedByEveryRank) {
  AttentionSpec broken = call(2);
  broken.k.sizes = {750, 4, 16};
  broken.softmax_scale = 1.0 / 0.0;
  broken.backend_supports = {"softmax_scale"};
  const auto own = check_attention(broken);
  ASSERT_EQ(own.size(), 2u);
  Texts texts = group([](AttentionSpec&, int64_t) {});
  texts[2] = failed_fingerprint(own);
  EXPECT_EQ(texts[2].rfind("error=", 0), 0u);
  const auto problems = compare_fingerprints(texts);
  ASSERT_EQ(problems.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(problems[i].id, own[i].id);
    EXPECT_EQ(problems[i].kind, own[i].kind);
    EXPECT_EQ(problems[i].what, "rank 2: " + own[i].what);
    EXPECT_EQ(problems[i].rule, own[i].rule);
    EXPECT_EQ(problems[i].fix, own[i].fix);
  }
}

TEST(CompareFingerprints, ACommonFailureNeedsNoRank) {
  const std::string failed = failed_fingerprint({{.id = "CP020", .what = "a\nb\\n", .rule = "", .fix = "c"}});
  const auto problems = compare_fingerprints({failed, failed, failed});
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].what, "a\nb\\n") << "newlines and backslashes survive";
  EXPECT_EQ(compare_fingerprints({failed, "op=x\n", failed})[0].what.rfind("ranks 0, 2: a", 0), 0u);
}

TEST(CompareFingerprints, AFailedRankKeepsIdKindAndText) {
  const base::Problem problem{
      .id = "CP032", .kind = base::ErrorKind::kUnsupported, .what = "no kernel", .rule = "", .fix = "x"};
  const auto problems = compare_fingerprints({"op=x\n", failed_fingerprint({problem})});
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(base::format(problems[0], "op"), "[op] rank 1: no kernel. Fix: x. [CP032]");
  EXPECT_EQ(problems[0].kind, base::ErrorKind::kUnsupported);
}

TEST(CompareFingerprints, GarbageIsSafe) {
  EXPECT_FALSE(compare_fingerprints({"error=", "error_id=x\n=\n\\"}).empty());
  EXPECT_FALSE(compare_fingerprints({"error_id=x", "a=b"}).empty());
  EXPECT_NO_THROW(compare_fingerprints({"", "no equals", "\n\n"}));
  EXPECT_NO_THROW(text_of(AttentionSpec{}));
}

TEST(FingerprintText, OneLinePerField) { EXPECT_EQ(fingerprint_text({{"a", "1"}, {"b", "x\ny"}}), "a=1\nb=x\\ny\n"); }

TEST(FingerprintHash, MatchesThePublishedVectors) {
  // FNV-1a 64-bit test vectors from the algorithm's reference page (isthe.com/chongo/tech/comp/fnv).
  EXPECT_EQ(fingerprint_hash(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(fingerprint_hash("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(fingerprint_hash("foobar"), 0x85944171f73967e8ULL);
}

}  // namespace
}  // namespace ulysses::contract
