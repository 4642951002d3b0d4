#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ulysses::contract {

// What a context-parallel attention must keep, in the numbers that the guide and the doctor's findings use.
struct ChecklistPoint {
  std::string_view point;
  std::string_view enforced_by;
};

std::span<const ChecklistPoint> checklist();  // point 1 first
std::string checklist_text(int64_t number);   // "2. K and V are global: …"; "" for a number that is none
std::string render_checklist();               // Markdown

}  // namespace ulysses::contract
