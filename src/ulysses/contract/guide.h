#pragma once

#include <string>
#include <string_view>

namespace ulysses::contract {

// Python source of the pure-torch function to copy without installing anything; generated into the build from
// python/ulysses_attention/recipe.py.
extern const std::string_view kRecipeSource;

// docs/guide.md: symptoms in the words that users see, then rules, capability table, checklist and how-to. Rules,
// defaults and cells are read from policy_fields() and capability_table(), never repeated here.
std::string render_guide(std::string_view recipe_source);

// Strategy × feature as a Markdown table.
std::string render_capability_table();

// docs/capabilities.md: the same table with the test that proves each cell and, in refused rows, what other libraries
// do.
std::string render_capability_page();

}  // namespace ulysses::contract
