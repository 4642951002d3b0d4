#include "ulysses/partition/check_report.h"

#include <algorithm>
#include <array>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/contract/rules.h"
#include "ulysses/partition/head_ranges.h"
#include "ulysses/partition/sequence_layout.h"

namespace ulysses::partition {
namespace {

using base::cat;
using base::join;
using contract::SequenceMode;

constexpr int64_t kMostRanksShown = 64;
constexpr int64_t kMostRanksPlanned = 1024;

std::vector<base::Problem> all_problems(const CheckRequest& request) {
  std::vector<base::Problem> problems;
  contract::add(problems,
                contract::check_word("CP001", "backend_name", request.policy.backend_name, request.known_backends));
  for (base::Problem& problem : contract::check_config(request.policy, request.seq_len, request.cp_size)) {
    problems.push_back(std::move(problem));
  }
  if (request.num_heads || request.num_kv_heads) {
    const int64_t heads = request.num_heads.value_or(request.num_kv_heads.value_or(0));
    const int64_t kv_heads = request.num_kv_heads.value_or(heads);
    contract::add(problems, contract::check_head_counts(heads, kv_heads));
  }
  return problems;
}

std::string_view mode_text(SequenceMode mode) {
  switch (mode) {
    case SequenceMode::kPad:
      return "pad (the end of the sequence is padded to equal shards; padding never reaches a kernel)";
    case SequenceMode::kStrict:
      return "strict (auto_pad=False: a length that does not divide is refused)";
    case SequenceMode::kUneven:
      break;
  }
  return "uneven (require_seq_divisible=False: exact lengths, no padding)";
}

// Multiples of cp_size * pad_multiple around the length.
std::string legal_lengths(const CheckRequest& request) {
  if (!request.policy.require_seq_divisible) return "any";
  const auto step = contract::checked_multiply(request.cp_size, request.policy.pad_multiple);
  if (!step) return "none fits 64 bits: choose a smaller pad_multiple";
  const int64_t below = request.seq_len / *step;
  std::vector<int64_t> lengths;
  for (int64_t factor = std::max<int64_t>(below - 1, 1); factor <= below + 2 && lengths.size() < 4; ++factor) {
    if (const auto length = contract::checked_multiply(factor, *step)) lengths.push_back(*length);
  }
  return cat(join(lengths), " (multiples of cp_size*pad_multiple=", *step, ')');
}

// The eight legal degrees next to cp_size for the length as it is.
std::string legal_degrees(const CheckRequest& request) {
  const auto divides = [&](int64_t degree) {
    const auto step = contract::checked_multiply(degree, request.policy.pad_multiple);
    return !request.policy.require_seq_divisible || (step && request.seq_len % *step == 0);
  };
  const int64_t last = std::min(kMostRanksPlanned,
                                request.cp_size <= kMostRanksPlanned / 2 ? request.cp_size * 2 + 8 : kMostRanksPlanned);
  std::vector<int64_t> degrees;
  for (int64_t degree = 1; degree <= last; ++degree) {
    if (divides(degree)) degrees.push_back(degree);
  }
  const auto nearness = [&](int64_t degree) {
    return std::max(degree, request.cp_size) - std::min(degree, request.cp_size);
  };
  std::stable_sort(degrees.begin(), degrees.end(), [&](int64_t a, int64_t b) { return nearness(a) < nearness(b); });
  degrees.resize(std::min<size_t>(degrees.size(), 8));
  std::sort(degrees.begin(), degrees.end());
  if (degrees.empty()) return cat("none up to ", last, " for seq_len=", request.seq_len, " unpadded");
  return cat(join(degrees), " for seq_len=", request.seq_len, " unpadded");
}

// Degrees at which every rank owns equally many query heads and no KV head is sent twice.
std::string even_head_degrees(int64_t heads, int64_t kv_heads) {
  std::vector<int64_t> degrees;
  for (int64_t degree = 1; degree <= std::min(kv_heads, kMostRanksPlanned); ++degree) {
    if (heads % degree == 0 && kv_heads % degree == 0) degrees.push_back(degree);
  }
  return cat(join(degrees), " give equal heads on every rank; any other works too, balanced within one");
}

std::string range_text(const Range& range) {
  return range.empty() ? "none" : cat('[', range.begin, ", ", range.end, ')');
}

using Cells = std::vector<std::string>;

std::string render_table(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const Cells& row : rows) {
    for (size_t column = 0; column < row.size(); ++column)
      widths[column] = std::max(widths[column], row[column].size());
  }
  std::string text;
  for (const Cells& row : rows) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column) {
      line += row[column] + std::string(widths[column] - row[column].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string rank_table(const CheckRequest& request, const SequenceLayout& layout) {
  std::optional<HeadRanges> heads;
  std::vector<Cells> rows = {{"rank", "tokens", "count", "padded rows"}};
  if (request.num_heads) {
    heads = head_ranges(*request.num_heads, request.num_kv_heads.value_or(*request.num_heads), request.cp_size);
    rows.front().insert(rows.front().end(), {"query heads", "count", "KV heads"});
  }
  for (int64_t rank = 0; rank < std::min(request.cp_size, kMostRanksShown); ++rank) {
    const auto index = static_cast<size_t>(rank);
    Cells row = {cat(rank), range_text(layout.tokens(rank)), cat(layout.lengths()[index]),
                 cat(layout.padded_lengths()[index])};
    if (heads) {
      row.push_back(range_text(heads->query[index]));
      row.push_back(cat(heads->query[index].size()));
      row.push_back(range_text(heads->kv[index]));
    }
    rows.push_back(std::move(row));
  }
  std::string text = render_table(rows);
  if (request.cp_size > kMostRanksShown) text += cat("… and ", request.cp_size - kMostRanksShown, " more ranks\n");
  return text;
}

// The table under the policy, or, where strict mode refuses the length, under the padding that the fix names.
std::string plan(const CheckRequest& request) {
  contract::UlyssesContextParallelPolicy policy = request.policy;
  std::string title = "Who holds what";
  if (policy.sequence_mode() == SequenceMode::kStrict &&
      !contract::check_divisible(policy, "seq_len", request.seq_len, request.cp_size, true).empty()) {
    policy.auto_pad = true;
    title += " once padded";
  }
  const SequenceLayout layout(request.seq_len, request.cp_size, policy);
  const auto rows = contract::checked_multiply(layout.padded_lengths().front(), request.cp_size);
  if (policy.require_seq_divisible && rows) title += cat(" (seq_len ", request.seq_len, " in ", *rows, " rows)");
  return cat('\n', title, ":\n", rank_table(request, layout));
}

bool has_any(const std::vector<base::Problem>& problems, std::initializer_list<std::string_view> ids) {
  return std::any_of(problems.begin(), problems.end(), [&](const base::Problem& problem) {
    return std::find(ids.begin(), ids.end(), problem.id) != ids.end();
  });
}

}  // namespace

std::string check_report(const CheckRequest& request, int* exit_code) {
  CheckRequest full = request;
  if (!full.num_heads) full.num_heads = full.num_kv_heads;
  const std::vector<base::Problem> problems = all_problems(full);
  if (exit_code != nullptr) *exit_code = problems.empty() ? 0 : 1;

  std::string text = cat("seq_len=", full.seq_len, " cp_size=", full.cp_size);
  if (full.num_heads)
    text += cat(" heads=", *full.num_heads, " kv_heads=", full.num_kv_heads.value_or(*full.num_heads));
  text += cat("\nSequence mode: ", mode_text(full.policy.sequence_mode()), "\n\n");
  text +=
      problems.empty() ? "No problem.\n" : cat(problems.size(), problems.size() == 1 ? " problem:\n" : " problems:\n");
  for (const base::Problem& problem : problems) text += cat("  ", base::format(problem, "ulysses_attention"), '\n');

  if (has_any(problems, {"CP006"})) return text;  // without sizes nothing can be planned
  text += cat("\nLegal lengths near by: ", legal_lengths(full),
              "\nLegal cp_size near by, without padding: ", legal_degrees(full), '\n');
  const bool heads_are_legal = full.num_heads && !has_any(problems, {"CP023"});
  if (heads_are_legal) {
    const int64_t kv_heads = full.num_kv_heads.value_or(*full.num_heads);
    text += cat("Head degrees: ", even_head_degrees(*full.num_heads, kv_heads), '\n');
  }
  // A policy that is refused for another reason than the length makes no layout either.
  if (has_any(problems, {"CP002", "CP003", "CP004", "CP005", "CP007", "CP023"})) return text;
  if (full.cp_size > kMostRanksPlanned) return text + cat("\nNo table above ", kMostRanksPlanned, " ranks.\n");
  const bool runs = full.policy.sequence_mode() == SequenceMode::kPad && has_any(problems, {"CP010", "CP011"});
  if (runs) text += "\nUnder this policy SequenceLayout pads the raw length, so the operation runs as follows.\n";
  return text + plan(full);
}

}  // namespace ulysses::partition
