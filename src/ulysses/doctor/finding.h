#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ulysses::doctor {

// What is wrong, in one plain sentence with the tokens, heads or ranks that were measured.
struct Finding {
  std::string kind;                // a stable word: "local_only"
  std::string sentence;            // "each rank attends only to its own tokens: keys 0-7 never influence queries 8-31"
  std::vector<std::string> cases;  // ids of the cases that show it

  int64_t checklist_point() const;  // of the guide
  std::string anchor() const;       // "docs/guide.md#checklist"
};

}  // namespace ulysses::doctor
