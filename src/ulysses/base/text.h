#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace ulysses::base {

// Out of line: inlined into long concatenations it makes GCC 12 warn of bounds that are not crossed.
void append(std::string& text, std::string_view part);

// Anything that streams. Text, characters and whole numbers, most of what a call writes, do without a stream: making
// one takes longer than writing the text.
template <typename Part>
void append_shown(std::string& text, const Part& part) {
  if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    append(text, part);
  } else if constexpr (std::is_same_v<Part, char>) {
    append(text, std::string_view(&part, 1));
  } else if constexpr (std::is_same_v<Part, int> || std::is_same_v<Part, int64_t> || std::is_same_v<Part, size_t>) {
    append(text, std::to_string(part));
  } else {
    std::ostringstream stream;
    stream << part;
    append(text, stream.str());
  }
}

// Concatenates anything that streams: cat("seq_len=", 3001).
template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::string text;
  (append_shown(text, parts), ...);
  return text;
}

// "a, b, c"
template <typename Range>
std::string join(const Range& items, std::string_view separator = ", ") {
  std::string text;
  bool first = true;
  for (const auto& item : items) {
    if (!first) append(text, separator);
    append_shown(text, item);
    first = false;
  }
  return text;
}

// Of a text that may bring a traceback with it.
inline std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace ulysses::base
