// Built with ULYSSES_FLIP_CAPABILITY_FOR_TESTS: the cell (ulysses, is_causal) is refused as CP041. Rules, guide and
// table must follow, because they read the one array.
#include <gtest/gtest.h>

#include <string>

#include "ulysses/contract/attention_spec.h"
#include "ulysses/contract/guide.h"

namespace ulysses::contract {
namespace {

AttentionSpec causal_call(const std::string& strategy) {
  AttentionSpec spec;
  spec.q = spec.k = spec.v = {.sizes = {1, 8, 4, 16}, .dtype = "float32", .device = "cpu"};
  spec.cp_size = 2;
  spec.strategy = strategy;
  spec.is_causal = true;
  spec.backend_supports = {"is_causal", "q_positions"};
  return spec;
}

TEST(FlippedCell, ChangesTheRules) {
  const auto problems = check_attention(causal_call("ulysses"));
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].id, "CP041");
  EXPECT_EQ(problems[0].kind, base::ErrorKind::kUnsupported);
  EXPECT_EQ(problems[0].what, "is_causal is not offered by strategy=\"ulysses\"");
  EXPECT_EQ(problems[0].fix, "is_causal=False, or strategy=\"allgather_kv\"");
  EXPECT_TRUE(check_attention(causal_call("allgather_kv")).empty());
}

TEST(FlippedCell, ChangesTableAndGuide) {
  const std::string row = "| `is_causal` | no (CP041); instead: is_causal=False | yes: ";
  EXPECT_NE(render_capability_table().find(row), std::string::npos);
  EXPECT_NE(render_guide("").find(row), std::string::npos);
}

}  // namespace
}  // namespace ulysses::contract
