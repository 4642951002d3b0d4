// The operation reads the flipped cell too: is_causal under "ulysses" is refused with the table's id, on every rank and
// before any data moves; the guide says the same.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>

#include "collectives.h"
#include "ulysses/contract/guide.h"
#include "ulysses/transports/recording/recording_group.h"
#include "ulysses/ulysses.h"

namespace ulysses {
namespace {

using testing::contains;
using testing::error_of;

AttentionOptions causal(const std::string& strategy, const std::string& agreement) {
  AttentionOptions options;
  options.strategy = strategy;
  options.agreement = agreement;
  options.is_causal = true;
  return options;
}

TEST(FlippedCell, ChangesTheOperationWithGuideAndTable) {
  const contract::Capability& cell = contract::capability("ulysses", contract::Feature::kIsCausal);
  ASSERT_EQ(cell.support, contract::Support::kRefused);
  const std::string id(cell.id);
  const std::string row = "| `is_causal` | no (" + id + ")";
  EXPECT_TRUE(contains(contract::render_capability_table(), row));
  EXPECT_TRUE(contains(contract::render_guide(""), row));
  run_ranks(2, [&](int64_t, const Group& group) {
    const auto recorder = std::make_shared<transports::Recorder>();
    const Group recorded(transports::record_group(group.process_group(), recorder));
    const at::Tensor x = at::ones({1, 4, 2, 8});
    const auto call = [&](const AttentionOptions& options) { return ulysses_attention(x, x, x, recorded, options); };
    const auto text = error_of([&] { call(causal("ulysses", "auto")); }, id);
    EXPECT_TRUE(contains(text, "is_causal is not offered by strategy=\"ulysses\"")) << text;
    EXPECT_TRUE(contains(text, "Fix: is_causal=False, or strategy=\"allgather_kv\"")) << text;
    recorder->clear();
    EXPECT_FALSE(error_of([&] { call(causal("ulysses", "off")); }, id).empty());
    EXPECT_TRUE(recorder->records().empty());
    EXPECT_EQ(call(causal("allgather_kv", "off")).out.sizes(), x.sizes());  // the fix works
  });
}

}  // namespace
}  // namespace ulysses
