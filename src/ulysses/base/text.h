#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace ulysses::base {

// Concatenates anything that streams: cat("seq_len=", 3001).
template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// "a, b, c"
template <typename Range>
std::string join(const Range& items, std::string_view separator = ", ") {
  std::ostringstream stream;
  bool first = true;
  for (const auto& item : items) {
    if (!first) stream << separator;
    stream << item;
    first = false;
  }
  return stream.str();
}

// Of a text that may bring a traceback with it.
inline std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace ulysses::base
