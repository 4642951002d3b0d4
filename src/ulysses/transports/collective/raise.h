#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "ulysses/base/error.h"

namespace ulysses::transports {

// CP062 in the words that every transport has for what became of the group.
[[noreturn]] inline void raise_cp062(std::string what, std::string rule, std::string fix, std::string_view op,
                                     int64_t rank, int64_t size) {
  throw base::Error({{"CP062", base::ErrorKind::kCommunication, std::move(what), std::move(rule), std::move(fix)}}, op,
                    rank, size);
}

// An error of one rank that leaves the group as it was.
[[noreturn]] inline void raise_usable(std::string what, std::string fix, std::string_view op, int64_t rank,
                                      int64_t size) {
  raise_cp062(std::move(what), "The group is still usable", std::move(fix), op, rank, size);
}

// What find_disagreement says; every rank raises it.
[[noreturn]] inline void raise_disagreement(std::string what, std::string_view op, int64_t rank, int64_t size) {
  raise_cp062(std::move(what), "Nothing was exchanged and the group is still usable",
              "make every rank call the same collective with matching tensors", op, rank, size);
}

[[noreturn]] inline void raise_unusable(std::string what, std::string fix, std::string_view op, int64_t rank,
                                        int64_t size) {
  raise_cp062(std::move(what), "The group is no longer usable", std::move(fix), op, rank, size);
}

}  // namespace ulysses::transports
