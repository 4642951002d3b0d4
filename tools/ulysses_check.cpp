// ulysses-check: would this length, these heads and this policy run on so many ranks? No torch, no Python.
// Exit code: 0 no problem, 1 problems, 2 wrong usage.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <iostream>
#include <string>
#include <type_traits>

#include "ulysses/contract/error_catalogue.h"
#include "ulysses/contract/guide.h"
#include "ulysses/partition/check_report.h"

namespace {

struct Arguments {
  ulysses::partition::CheckRequest request;
  bool guide = false, errors = false, table = false;
};

// CLI11 would clamp what does not fit, and the report would be about another number.
const CLI::Validator kInt64(
    [](std::string& text) {
      int64_t number = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
      const bool fits = error == std::errc() && end == text.data() + text.size();
      return fits ? std::string() : text + " is not a 64-bit integer";
    },
    "INT64");

// One option per field of the policy, under the field's name.
void add_policy_options(CLI::App& app, ulysses::contract::UlyssesContextParallelPolicy& policy) {
  const auto option = [&app](const char* name, auto& field, const char* help) {
    auto* added = app.add_option(name, field, help)->group("Policy")->capture_default_str();
    if constexpr (std::is_same_v<std::remove_reference_t<decltype(field)>, int64_t>) added->check(kInt64);
  };
  option("--backend-name", policy.backend_name, "registered backend");
  option("--require-seq-divisible", policy.require_seq_divisible, "true or false");
  option("--auto-pad", policy.auto_pad, "true or false");
  option("--pad-multiple", policy.pad_multiple, "a shard's length is a multiple of this");
  option("--kv-must-be-global", policy.kv_must_be_global, "true; false is refused");
  option("--output-restore-dim", policy.output_restore_dim, "sequence dimension of the output");
  option("--base-processor", policy.base_processor, "class that every backend inherits");
  app.add_option("--required-checks", policy.required_checks, "comma-separated; removing one is refused")
      ->group("Policy")
      ->delimiter(',')
      ->capture_default_str();
}

void add_options(CLI::App& app, Arguments& arguments) {
  auto* guide = app.add_flag("--guide", arguments.guide, "print the guide (Markdown)");
  auto* errors = app.add_flag("--errors", arguments.errors, "print all error ids (Markdown)");
  auto* table = app.add_flag("--table", arguments.table, "print the capability table with its tests (Markdown)");
  guide->excludes(errors)->excludes(table);
  errors->excludes(table);
  app.add_option("--seq-len", arguments.request.seq_len, "tokens of the whole sequence")->check(kInt64);
  app.add_option("--cp-size", arguments.request.cp_size, "ranks of the group")->check(kInt64);
  app.add_option("--heads", arguments.request.num_heads, "query heads")->check(kInt64);
  app.add_option("--kv-heads", arguments.request.num_kv_heads, "key/value heads; as --heads if left out")
      ->check(kInt64);
  add_policy_options(app, arguments.request.policy);
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int kUsage = 2;
  CLI::App app{"Checks a context-parallel configuration and shows which rank would hold what.", "ulysses-check"};
  Arguments arguments;
  add_options(app, arguments);
  try {
    app.parse(argc, argv);
    const bool prints = arguments.guide || arguments.errors || arguments.table;
    if (!prints && (app.count("--seq-len") == 0 || app.count("--cp-size") == 0)) {
      throw CLI::RequiredError("--seq-len and --cp-size, or one of --guide, --errors, --table");
    }
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;  // 0: --help
  }
  int exit_code = 0;
  if (arguments.guide) {
    std::cout << ulysses::contract::render_guide(ulysses::contract::kRecipeSource);
  } else if (arguments.errors) {
    std::cout << ulysses::contract::render_errors_markdown();
  } else if (arguments.table) {
    std::cout << ulysses::contract::render_capability_page();
  } else {
    std::cout << ulysses::partition::check_report(arguments.request, &exit_code);
  }
  return exit_code;
}
