#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ulysses/base/text.h"
#include "ulysses/contract/attention_spec.h"

// A rule broken, what is said of it, and every printed fix applied.
namespace ulysses::contract {

using base::ErrorKind;
using base::Problem;
using Ids = std::vector<std::string>;

// A legal call on rank 0 of 4: B=2, S_local=752, H=6, H_kv=2, D=16.
inline AttentionSpec legal() {
  AttentionSpec spec;
  spec.q = {.sizes = {2, 752, 6, 16}, .dtype = "float32", .device = "cpu"};
  spec.k = {.sizes = {2, 752, 2, 16}, .dtype = "float32", .device = "cpu"};
  spec.v = spec.k;
  spec.cp_size = 4;
  spec.known_kernels = {"math", "torch_cpu_flash"};
  spec.known_backends = {"ulysses", "allgather_kv"};
  spec.backend_supports = {"is_causal", "softmax_scale", "q_positions", "need_lse", "attn_mask", "sinks", "softcap"};
  return spec;
}

inline Ids ids(const std::vector<Problem>& problems) {
  Ids found;
  for (const Problem& problem : problems) found.push_back(problem.id);
  return found;
}

inline void set_rows(TensorSpec& tensor, int64_t rows) { tensor.sizes[1] = rows; }
inline void set_layout(AttentionSpec& spec, std::vector<int64_t> lengths, std::vector<int64_t> padded) {
  spec.layout = LayoutSpec{.lengths = std::move(lengths), .padded_lengths = std::move(padded), .cp_rank = {}};
}

using Change = std::function<void(AttentionSpec&)>;

// One violated rule: how to break it, what is said, and every alternative of the fix with the change that it asks for.
struct Case {
  std::string id;
  Change break_it;
  std::string what;
  std::vector<std::pair<std::string, Change>> fixes;
};

#define CHANGE(...) [](AttentionSpec& s) { __VA_ARGS__; }

inline void run_cases(const std::vector<Case>& cases) {
  for (const Case& item : cases) {
    AttentionSpec broken = legal();
    item.break_it(broken);
    const auto problems = check_attention(broken);
    ASSERT_EQ(ids(problems), Ids{item.id}) << item.what;
    EXPECT_EQ(problems[0].what, item.what);
    const bool refusal = item.id >= "CP040" && item.id <= "CP050";
    EXPECT_EQ(problems[0].kind, refusal ? ErrorKind::kUnsupported : ErrorKind::kInvalidArgument) << item.id;
    std::string all_fixes;
    for (const auto& [text, repair] : item.fixes) {
      all_fixes += text;
      AttentionSpec repaired = broken;
      repair(repaired);
      const auto left = check_attention(repaired);
      EXPECT_TRUE(left.empty()) << item.id << " after " << text << ": " << base::format(left[0]);
    }
    EXPECT_EQ(problems[0].fix, all_fixes) << item.id;
  }
}

}  // namespace ulysses::contract
