#include "ulysses/contract/guide.h"

#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <string>

#include "ulysses/base/error.h"
#include "ulysses/contract/capability.h"
#include "ulysses/contract/error_catalogue.h"
#include "ulysses/contract/policy.h"

namespace ulysses::contract {
namespace {

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::set<std::string> ids_in(const std::string& text) {
  static const std::regex pattern("CP[0-9]{3}");
  return {std::sregex_token_iterator(text.begin(), text.end(), pattern), std::sregex_token_iterator()};
}

TEST(Guide, OpensWithTheSymptomsInTheUsersWords) {
  const std::string guide = render_guide("");
  size_t last = 0;
  for (const char* symptom :
       {"## Symptoms",
        "The expanded size of the tensor (4096) must match the existing size (1024) at non-singleton dimension 1",
        "context_parallel_size=4 but sequence length 3000 is not divisible by cp_size", "behind attention",
        "The loss is too high, and there is no error", "## Rules and defaults"}) {
    const size_t at = guide.find(symptom);
    ASSERT_NE(at, std::string::npos) << symptom;
    EXPECT_GT(at, last) << symptom;
    last = at;
  }
}

TEST(Guide, ShowsTheLengthErrorThatTheCodeRaises) {
  EXPECT_TRUE(contains(render_guide(""), UlyssesContextParallelPolicy{}.validate_config(3000, 4).at(0)));
  EXPECT_TRUE(contains(render_guide(""), "pads the end to 3008"));
}

TEST(Guide, ReadsRulesFromThePolicy) {
  const std::string guide = render_guide("");
  for (const PolicyField& field : policy_fields()) {
    EXPECT_TRUE(contains(guide, "| `" + std::string(field.name) + "` | `" + std::string(field.default_text) + "` |"))
        << field.name;
  }
}

TEST(Guide, HasTheTableTheChecklistAndTheRecipe) {
  const std::string guide = render_guide("import torch\n# recipe\n\n");
  EXPECT_TRUE(contains(guide, render_capability_table()));
  EXPECT_TRUE(contains(guide, "```python\nimport torch\n# recipe\n```\n"));
  for (const char* point : {"| 1 | ", "| 2 | ", "| 3 | ", "| 4 | ", "| 5 | ", "| 6 | "})
    EXPECT_TRUE(contains(guide, point));
  for (const std::string_view check : known_checks()) EXPECT_TRUE(contains(guide, check)) << check;
  EXPECT_TRUE(contains(guide, "a rank that later leaves the agreed signature"));
}

TEST(Guide, TheBuiltInRecipeIsTheFile) {
  EXPECT_TRUE(contains(std::string(kRecipeSource), "import torch"));
  EXPECT_EQ(kRecipeSource.find("@RECIPE@"), std::string_view::npos);
}

TEST(CapabilityTableText, HasEveryCell) {
  for (const std::string& table : {render_capability_table(), render_capability_page()}) {
    for (const Capability& cell : capability_table()) {
      EXPECT_TRUE(contains(table, cell.note)) << to_string(cell.feature);
      EXPECT_TRUE(contains(table, cell.id)) << cell.id;
    }
  }
}

TEST(CapabilityTableText, ThePageSaysWhatOtherLibrariesDoWhereWeRefuse) {
  const std::string page = render_capability_page();
  for (const Capability& cell : capability_table())
    EXPECT_TRUE(contains(page, std::string(cell.peers) + " |\n")) << to_string(cell.feature);
}

TEST(ErrorCatalogue, EveryIdThatIsShownIsExplained) {
  for (const std::string& id : ids_in(render_guide("") + render_capability_page())) {
    EXPECT_NE(find_error(id), nullptr) << id;
  }
  EXPECT_EQ(find_error("CP035"), nullptr);
  EXPECT_EQ(find_error("CP013")->kind, base::ErrorKind::kRankMismatch);
}

TEST(ErrorCatalogue, IsSortedCompleteAndOneLineEach) {
  const std::set<std::string> expected = {
      "CP001", "CP002", "CP003", "CP004", "CP005", "CP006", "CP007", "CP010", "CP011", "CP012", "CP013",
      "CP014", "CP015", "CP020", "CP021", "CP022", "CP023", "CP024", "CP025", "CP026", "CP027", "CP028",
      "CP029", "CP030", "CP031", "CP032", "CP033", "CP034", "CP040", "CP041", "CP042", "CP043", "CP044",
      "CP045", "CP047", "CP048", "CP049", "CP050", "CP051", "CP052", "CP053", "CP060", "CP062", "CP063",
      "CP064", "CP065", "CP066", "CP067", "CP068", "CP069", "CP070", "CP099"};
  std::set<std::string> found;
  std::string_view last;
  for (const CatalogueEntry& entry : error_catalogue()) {
    EXPECT_LT(last, entry.id);
    last = entry.id;
    found.emplace(entry.id);
    EXPECT_FALSE(entry.title.empty() || entry.cause.empty() || entry.fix.empty()) << entry.id;
  }
  EXPECT_EQ(found, expected);
  EXPECT_EQ(ids_in(render_errors_markdown()), expected);
  EXPECT_TRUE(contains(render_errors_markdown(), "| CP041 | window | unsupported, `NotImplementedError` |"));
}

TEST(ErrorCatalogue, KindsAreThoseOfTheTable) {
  for (const Capability& cell : capability_table()) {
    if (cell.support == Support::kSupported) continue;
    EXPECT_EQ(find_error(cell.id)->kind, base::ErrorKind::kUnsupported) << cell.id;
  }
}

}  // namespace
}  // namespace ulysses::contract
