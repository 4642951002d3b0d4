#include "ulysses/transports/collective/contribution.h"

#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

// "rank 0 calls all_reduce, rank 1 calls all_gather" if the values differ, else empty.
template <typename Value, typename Text>
std::string find_difference(const std::vector<Contribution>& ranks, std::string_view verb, Value value, Text text) {
  bool differ = false;
  for (const auto& rank : ranks) differ = differ || value(rank) != value(ranks.front());
  if (!differ) return {};
  std::vector<std::string> parts;
  for (size_t r = 0; r < ranks.size(); ++r) parts.push_back(base::cat("rank ", r, ' ', verb, ' ', text(ranks[r])));
  return base::join(parts);
}

std::string find_refusals(const std::vector<Contribution>& ranks) {
  std::vector<std::string> parts;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (!ranks[r].problem.empty()) parts.push_back(base::cat("rank ", r, ": ", ranks[r].problem));
  }
  return base::join(parts, "; ");
}

std::string find_size_mismatch(const std::vector<Contribution>& ranks) {
  std::vector<std::string> parts;
  for (size_t source = 0; source < ranks.size(); ++source) {
    for (size_t destination = 0; destination < ranks.size(); ++destination) {
      const int64_t sent = ranks[source].send[destination].bytes;
      const int64_t expected = ranks[destination].receive[source].bytes;
      if (sent == expected) continue;
      parts.push_back(base::cat("rank ", source, " sends ", sent, " bytes to rank ", destination, ", which expects ",
                                expected, " bytes"));
    }
  }
  return base::join(parts, "; ");
}

}  // namespace

std::string find_disagreement(const std::vector<Contribution>& ranks) {
  std::string text = find_difference(
      ranks, "calls", [](const auto& c) { return c.op; }, [](const auto& c) { return c.op; });
  if (text.empty()) text = find_refusals(ranks);
  if (text.empty()) {
    text = find_difference(
        ranks, "has", [](const auto& c) { return c.dtype; },
        [](const auto& c) { return base::cat("dtype ", c10::toString(c.dtype)); });
  }
  if (text.empty()) {
    text = find_difference(
        ranks, "names root", [](const auto& c) { return c.root; }, [](const auto& c) { return c.root; });
  }
  if (text.empty()) {
    text = find_difference(
        ranks, "reduces with op", [](const auto& c) { return c.reduce_op; }, [](const auto& c) { return c.reduce_op; });
  }
  if (text.empty()) text = find_size_mismatch(ranks);
  return text;
}

std::string name_ranks(const std::vector<int64_t>& ranks) {
  return base::cat(ranks.size() == 1 ? "rank " : "ranks ", base::join(ranks));
}

}  // namespace ulysses::transports
