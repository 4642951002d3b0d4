#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "ulysses/base/text.h"
#include "ulysses/contract/fingerprint.h"
#include "ulysses/contract/rules.h"

// Reading the texts of fingerprint.h and comparing them.
namespace ulysses::contract {
namespace {

using base::cat;
using base::ErrorKind;
using base::join;
using base::Problem;

constexpr std::string_view kErrorPrefix = "error=";

std::string escaped(std::string_view value) {
  std::string text;
  for (const char character : value) {
    if (character == '\n') {
      text += "\\n";
    } else if (character == '\\') {
      text += "\\\\";
    } else {
      text += character;
    }
  }
  return text;
}

std::string unescaped(std::string_view text) {
  std::string value;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      value += text[i];
    } else {
      value += text[++i] == 'n' ? '\n' : text[i];
    }
  }
  return value;
}

FingerprintFields parse(std::string_view text) {
  FingerprintFields fields;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    fields.emplace_back(line.substr(0, equals), unescaped(line.substr(equals + 1)));
  }
  return fields;
}

ErrorKind kind_from_string(std::string_view name) {
  for (const ErrorKind kind :
       {ErrorKind::kInvalidArgument, ErrorKind::kUnsupported, ErrorKind::kRankMismatch, ErrorKind::kCommunication}) {
    if (name == base::to_string(kind)) return kind;
  }
  return ErrorKind::kInternal;
}

// The problems that a failed rank announced; each starts with an "error" line.
std::vector<Problem> announced_problems(std::string_view text) {
  std::vector<Problem> problems;
  for (auto& [field, value] : parse(text)) {
    if (field == "error") {
      problems.push_back({.id = "CP062", .kind = ErrorKind::kInternal, .what = value, .rule = "", .fix = ""});
    } else if (field == "error_id") {
      problems.back().id = value;
    } else if (field == "error_kind") {
      problems.back().kind = kind_from_string(value);
    } else if (field == "error_rule") {
      problems.back().rule = value;
    } else if (field == "error_fix") {
      problems.back().fix = value;
    }
  }
  return problems;
}

// "rank 2" or "ranks 0, 1, 3"; a long list is cut.
std::string rank_names(const std::vector<size_t>& ranks) {
  constexpr size_t kMostNamed = 16;
  const std::vector<size_t> named(ranks.begin(), ranks.begin() + std::min(ranks.size(), kMostNamed));
  std::string text = cat(ranks.size() == 1 ? "rank " : "ranks ", join(named));
  if (ranks.size() > kMostNamed) text += cat(" and ", ranks.size() - kMostNamed, " more");
  return text;
}

std::vector<Problem> problems_of_failed_ranks(const std::vector<std::string>& texts) {
  std::vector<std::pair<Problem, std::vector<size_t>>> failures;  // each with the ranks that report it
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].rfind(kErrorPrefix, 0) != 0) continue;
    for (Problem& problem : announced_problems(texts[rank])) {
      const auto known = std::find_if(failures.begin(), failures.end(), [&](const auto& failure) {
        const Problem& other = failure.first;
        return other.id == problem.id && other.what == problem.what && other.fix == problem.fix;
      });
      if (known == failures.end()) {
        failures.emplace_back(std::move(problem), std::vector<size_t>{rank});
      } else if (known->second.back() != rank) {
        known->second.push_back(rank);
      }
    }
  }
  std::vector<Problem> problems;
  for (auto& [problem, ranks] : failures) {
    if (ranks.size() != texts.size()) problem.what = cat(rank_names(ranks), ": ", problem.what);
    problems.push_back(std::move(problem));
  }
  return problems;
}

// Fields of every rank; a field that a rank did not send is absent.
struct Table {
  std::vector<std::string> names;                        // in the order of first appearance
  std::vector<std::map<std::string, std::string>> rows;  // by rank

  std::optional<std::string> value(size_t rank, const std::string& name) const {
    const auto it = rows[rank].find(name);
    return it == rows[rank].end() ? std::nullopt : std::optional(it->second);
  }
  bool agrees(const std::string& name) const {
    for (size_t rank = 1; rank < rows.size(); ++rank) {
      if (value(rank, name) != value(0, name)) return false;
    }
    return true;
  }
};

Table read_table(const std::vector<std::string>& texts) {
  Table table;
  for (const std::string& text : texts) {
    auto& row = table.rows.emplace_back();
    for (auto& [name, value] : parse(text)) {
      if (std::find(table.names.begin(), table.names.end(), name) == table.names.end()) table.names.push_back(name);
      row[name] = value;
    }
  }
  return table;
}

std::optional<int64_t> to_number(const std::optional<std::string>& text) {
  int64_t number = 0;
  if (!text) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc() || end != text->data() + text->size()) return std::nullopt;
  return number;
}

// Every rank's local length, or nothing if a rank sent none: then its layout or policy differs, which is reported.
std::optional<std::vector<int64_t>> local_lengths(const Table& table, const std::string& name) {
  std::vector<int64_t> lengths;
  for (size_t rank = 0; rank < table.rows.size(); ++rank) {
    const auto length = to_number(table.value(rank, name));
    if (!length) return std::nullopt;
    lengths.push_back(*length);
  }
  return lengths;
}

Problem unequal_lengths(const Table& table, std::string_view tensor, std::string_view argument,
                        const std::vector<int64_t>& lengths) {
  // A strict policy refuses a layout whose total does not divide: name one only where it works.
  bool layout_works = !check_shard_lengths("lengths", lengths);
  if (layout_works && table.value(0, "policy.auto_pad") == "False") {
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    UlyssesContextParallelPolicy policy;
    policy.pad_multiple = to_number(table.value(0, "policy.pad_multiple")).value_or(1);
    layout_works = check_divisible(policy, "seq_len", total, static_cast<int64_t>(lengths.size()), true).empty();
  }
  std::string fix = "require_seq_divisible=False";
  if (layout_works) fix = cat(argument, "=SequenceLayout.from_lengths([", join(lengths), "]), or ", fix);
  return {.id = "CP013",
          .kind = ErrorKind::kRankMismatch,
          .what = cat("local lengths of ", tensor, " differ without a layout: [", join(lengths), "] by rank"),
          .rule = "Without a layout every rank passes the same number of rows",
          .fix = std::move(fix)};
}

void add_unequal_lengths(const Table& table, std::vector<Problem>& problems) {
  const auto q = local_lengths(table, "seq_len_local");
  const auto k = local_lengths(table, "kv_len_local");
  const auto unequal = [](const std::vector<int64_t>& lengths) {
    return std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) != lengths.end();
  };
  if (q && unequal(*q)) problems.push_back(unequal_lengths(table, "q", "layout", *q));
  // One layout serves k and v too where they have q's lengths.
  if (k && unequal(*k) && k != q) problems.push_back(unequal_lengths(table, "k and v", "kv_layout", *k));
}

Problem disagreement(const Table& table, const std::string& name) {
  std::vector<std::pair<std::string, std::vector<size_t>>> holders;  // each value with its ranks
  for (size_t rank = 0; rank < table.rows.size(); ++rank) {
    const std::string value = table.value(rank, name).value_or("nothing");
    const auto known =
        std::find_if(holders.begin(), holders.end(), [&](const auto& holder) { return holder.first == value; });
    if (known == holders.end()) {
      holders.push_back({value, {rank}});
    } else {
      known->second.push_back(rank);
    }
  }
  std::vector<std::string> parts;
  for (const auto& [value, ranks] : holders) {
    std::string part = cat("rank ", ranks.front(), " has ", value);
    if (ranks.size() > 1)
      part += cat(" (so ", ranks.size() == 2 ? "has " : "have ", rank_names({ranks.begin() + 1, ranks.end()}), ')');
    parts.push_back(std::move(part));
  }
  return {.id = "CP060",
          .kind = ErrorKind::kRankMismatch,
          .what = cat("ranks disagree on ", name, ": ", join(parts)),
          .rule = "",
          .fix = cat("the same ", name, " on every rank")};
}

}  // namespace

std::string fingerprint_text(const FingerprintFields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += cat(name, '=', escaped(value), '\n');
  return text;
}

std::string failed_fingerprint(const std::vector<Problem>& problems) {
  FingerprintFields fields;
  for (const Problem& problem : problems) {
    fields.emplace_back("error", problem.what);
    fields.emplace_back("error_id", problem.id);
    fields.emplace_back("error_kind", base::to_string(problem.kind));
    fields.emplace_back("error_rule", problem.rule);
    fields.emplace_back("error_fix", problem.fix);
  }
  return fingerprint_text(fields);
}

std::vector<Problem> compare_fingerprints(const std::vector<std::string>& texts) {
  std::vector<Problem> problems = problems_of_failed_ranks(texts);
  if (!problems.empty()) return problems;
  if (std::adjacent_find(texts.begin(), texts.end(), std::not_equal_to<>()) == texts.end()) return {};
  const Table table = read_table(texts);
  add_unequal_lengths(table, problems);
  for (const std::string& name : table.names) {
    if (name == "seq_len_local" || name == "kv_len_local" || table.agrees(name)) continue;
    problems.push_back(disagreement(table, name));
  }
  return problems;
}

}  // namespace ulysses::contract
