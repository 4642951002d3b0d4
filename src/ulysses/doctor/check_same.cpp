#include "ulysses/doctor/check_same.h"

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/contract/fingerprint.h"
#include "ulysses/exchange/checksum.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::doctor {
namespace {

using base::cat;

// What one rank holds under one name.
struct Entry {
  bool comparable = true;
  int64_t checksum = 0;
  std::string kind;  // "float32 [2, 4]"
  bool operator==(const Entry&) const = default;
};
using Entries = std::map<std::string, Entry>;
using Holdings = std::vector<std::optional<Entry>>;  // of one name, per rank; empty where a rank does not pass it

Entry entry_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {false, 0, "None"};
  const std::string kind = cat(processors::dtype_name(tensor.scalar_type()), ' ', tensor.sizes());
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
    return {false, 0, cat(kind, " without dense values")};
  return {true, exchange::checksum(tensor), kind};
}

// One line per tensor: "comparable checksum kind<tab>name".
std::string text_of(const std::map<std::string, at::Tensor>& tensors) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    const Entry entry = entry_of(tensor);
    std::string shown = name;
    std::replace(shown.begin(), shown.end(), '\n', ' ');
    text += cat(entry.comparable ? 1 : 0, ' ', entry.checksum, ' ', entry.kind, '\t', shown, '\n');
  }
  return text;
}

Entries entries_of(const std::string& text) {
  Entries entries;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    const size_t tab = line.find('\t');
    std::istringstream words(line.substr(0, tab));
    Entry entry;
    words >> entry.comparable >> entry.checksum;
    std::getline(words >> std::ws, entry.kind);
    entries[line.substr(tab + 1)] = entry;
  }
  return entries;
}

// The first rank whose holding most ranks share.
size_t usual_rank(const Holdings& held) {
  size_t usual = 0;
  int64_t most = 0;
  for (size_t rank = 0; rank < held.size(); ++rank) {
    const int64_t count = std::count(held.begin(), held.end(), held[rank]);
    if (count > most) {
      usual = rank;
      most = count;
    }
  }
  return usual;
}

std::string state_of(const std::optional<Entry>& entry) { return entry ? "is " + entry->kind : "is missing"; }

std::string on_ranks(const std::vector<size_t>& ranks) {
  return cat(ranks.size() == 1 ? "on rank " : "on ranks ", base::join(ranks));
}

std::optional<base::Problem> problem_of(const std::string& name, const Holdings& held) {
  const size_t usual = usual_rank(held);
  const std::optional<Entry>& common = held[usual];
  std::map<std::string, std::vector<size_t>> odd;  // what is wrong → where
  std::vector<size_t> alike;
  for (size_t rank = 0; rank < held.size(); ++rank) {
    if (held[rank] == common) {
      alike.push_back(rank);
    } else {
      const bool values_only = held[rank] && common && held[rank]->kind == common->kind;
      odd[values_only ? "has other values" : state_of(held[rank])].push_back(rank);
    }
  }
  const bool comparable = !common || common->comparable;
  if (odd.empty() && comparable) return std::nullopt;
  std::vector<std::string> parts;
  for (const auto& [what, ranks] : odd) parts.push_back(cat(what, ' ', on_ranks(ranks)));
  parts.push_back(cat(state_of(common), ' ', on_ranks(alike)));
  const bool values_only = odd.size() == 1 && odd.contains("has other values");
  const std::string fix = !comparable   ? cat("pass ", name, " as a dense tensor with values")
                          : values_only ? cat("the same seed on every rank, or broadcast ", name, " from rank ", usual)
                          : common      ? cat("make ", name, ' ', common->kind, " on every rank")
                                        : cat("pass ", name, " on every rank or on none");
  return base::Problem{"CP068", base::ErrorKind::kRankMismatch, cat(name, ' ', base::join(parts, "; ")),
                       "What every rank needs alike must be equal bit for bit; the group is still usable", fix};
}

}  // namespace

void check_same(const std::map<std::string, at::Tensor>& tensors, const exchange::Group& group) {
  const std::string text = text_of(tensors);
  bool comparable = true;
  for (const auto& [name, entry] : entries_of(text)) comparable = comparable && entry.comparable;
  const std::vector<int64_t> mine = {static_cast<int64_t>(contract::fingerprint_hash(text)), comparable ? 1 : 0};
  bool equal = true;
  for (const std::vector<int64_t>& row : group.gather_numbers(mine)) equal = equal && row == mine && row[1] == 1;
  if (equal) return;

  std::vector<Entries> ranks;
  std::set<std::string> names;
  for (const std::string& other : group.gather_texts(text)) {
    ranks.push_back(entries_of(other));
    for (const auto& [name, entry] : ranks.back()) names.insert(name);
  }
  std::vector<base::Problem> problems;
  for (const std::string& name : names) {
    Holdings held;
    for (const Entries& entries : ranks) {
      const auto found = entries.find(name);
      held.push_back(found == entries.end() ? std::nullopt : std::optional<Entry>(found->second));
    }
    if (std::optional<base::Problem> problem = problem_of(name, held)) problems.push_back(std::move(*problem));
  }
  base::raise_if_any(std::move(problems), "check_same", group.rank(), group.size());
}

}  // namespace ulysses::doctor
