#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ulysses/base/error.h"

namespace ulysses::contract {

// One line per error id that this library raises. What a user sees carries the numbers; this says what stands behind.
struct CatalogueEntry {
  std::string_view id;
  base::ErrorKind kind;
  std::string_view title;
  std::string_view cause;
  std::string_view fix;
};

// In the order of the ids.
std::span<const CatalogueEntry> error_catalogue();

// nullptr for an id that is not in use.
const CatalogueEntry* find_error(std::string_view id);

// docs/errors.md.
std::string render_errors_markdown();

}  // namespace ulysses::contract
