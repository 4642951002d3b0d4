#include "ulysses/contract/rules.h"

#include <algorithm>

#include "ulysses/base/text.h"

namespace ulysses::contract {
namespace {

using base::cat;
using base::join;
using base::Problem;

// "3008 (752 per rank)"
std::string with_share(int64_t total, int64_t cp_size) { return cat(total, " (", total / cp_size, " per rank)"); }

Problem overflow_problem(const UlyssesContextParallelPolicy& policy, std::string_view name, int64_t seq_len,
                         int64_t cp_size) {
  std::vector<std::string> fixes;
  if (const auto step = checked_multiply(cp_size, policy.pad_multiple)) {
    const int64_t longest = INT64_MAX / *step * *step;
    fixes.push_back(cat(name, '=', longest, " or a shorter multiple of ", *step));
  } else {
    // The smallest legal pad_multiple helps only if the length then divides.
    if (seq_len % cp_size == 0) fixes.emplace_back("pad_multiple=1");
  }
  fixes.emplace_back("require_seq_divisible=False");
  return {.id = "CP007",
          .kind = base::ErrorKind::kInvalidArgument,
          .what = cat(name, '=', seq_len, " padded to a multiple of cp_size*pad_multiple=", cp_size, '*',
                      policy.pad_multiple, " does not fit 64 bits"),
          .rule = "",
          .fix = join(fixes, ", or ")};
}

std::vector<int64_t> divisors(int64_t number) {
  // Bounded, so that a nonsense head count stays cheap; real ones are far below.
  constexpr int64_t kLastTried = 1024;
  std::vector<int64_t> low, high;
  for (int64_t d = 1; d <= std::min(kLastTried, number / d); ++d) {
    if (number % d != 0) continue;
    low.push_back(d);
    if (d != number / d) high.insert(high.begin(), number / d);
  }
  low.insert(low.end(), high.begin(), high.end());
  return low;
}

// How much two words differ (Levenshtein), to name the likeliest one first.
size_t distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 64;
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

Problem invalid(std::string_view id, std::string what, std::string_view rule, std::string fix) {
  return {.id = std::string(id),
          .kind = base::ErrorKind::kInvalidArgument,
          .what = std::move(what),
          .rule = std::string(rule),
          .fix = std::move(fix)};
}

void add(std::vector<Problem>& problems, std::optional<Problem> problem) {
  if (problem) problems.push_back(*std::move(problem));
}

std::vector<Problem> to_list(std::optional<Problem> problem) {
  std::vector<Problem> problems;
  add(problems, std::move(problem));
  return problems;
}

std::optional<int64_t> checked_multiply(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

std::optional<int64_t> checked_round_up(int64_t value, int64_t multiple) {
  const int64_t rest = value % multiple;
  if (rest == 0) return value;
  int64_t rounded = 0;
  if (__builtin_add_overflow(value, multiple - rest, &rounded)) return std::nullopt;
  return rounded;
}

Problem not_64_bit(std::string_view number) {
  return invalid("CP007", cat(number, " is not a 64-bit integer"), "", "a number between 1 and 2^62");
}

std::optional<Problem> check_positive(std::string_view name, int64_t value, std::string_view fix) {
  if (value > 0) return std::nullopt;
  return Problem{.id = "CP006",
                 .kind = base::ErrorKind::kInvalidArgument,
                 .what = cat(name, '=', value, " is not positive"),
                 .rule = "",
                 .fix = std::string(fix)};
}

std::vector<Problem> check_divisible(const UlyssesContextParallelPolicy& policy, std::string_view name, int64_t seq_len,
                                     int64_t cp_size, bool offer_auto_pad) {
  if (!policy.require_seq_divisible || seq_len <= 0 || cp_size <= 0 || policy.pad_multiple <= 0) return {};
  std::vector<Problem> problems;
  const auto step = checked_multiply(cp_size, policy.pad_multiple);
  const auto padded = step ? checked_round_up(seq_len, *step) : std::nullopt;
  if (!padded) problems.push_back(overflow_problem(policy, name, seq_len, cp_size));

  const bool divides = seq_len % cp_size == 0;
  if (divides && (padded == seq_len || !padded)) return problems;
  std::vector<std::string> fixes;
  if (padded) fixes.push_back("pad to " + with_share(*padded, cp_size));
  if (offer_auto_pad && padded && !policy.auto_pad) fixes.emplace_back("auto_pad=True");
  if (divides) fixes.push_back("pad_multiple=1" + cat(" (", seq_len / cp_size, " per rank)"));
  fixes.emplace_back("require_seq_divisible=False");
  Problem problem{.id = divides ? "CP011" : "CP010",
                  .kind = base::ErrorKind::kInvalidArgument,
                  .what = cat(name, '=', seq_len, " is not divisible by cp_size=", cp_size),
                  .rule = "Shards must be equal under this policy",
                  .fix = join(fixes, ", or ")};
  if (divides) {
    problem.what = cat(name, '=', seq_len, " divides by cp_size=", cp_size,
                       " but not by cp_size*pad_multiple=", cp_size, '*', policy.pad_multiple, '=', *step);
    problem.rule = "";
  }
  problems.push_back(std::move(problem));
  return problems;
}

std::optional<Problem> check_local_rows(const UlyssesContextParallelPolicy& policy, std::string_view name, int64_t rows,
                                        int64_t cp_size) {
  if (policy.sequence_mode() != SequenceMode::kStrict || policy.pad_multiple <= 0 || rows < 0) return std::nullopt;
  if (rows % policy.pad_multiple == 0) return std::nullopt;
  std::vector<std::string> fixes;
  const auto padded = checked_round_up(rows, policy.pad_multiple);
  const auto total = padded && cp_size > 0 ? checked_multiply(*padded, cp_size) : std::nullopt;
  if (total) fixes.push_back("a seq_len of " + with_share(*total, cp_size));
  fixes.emplace_back("auto_pad=True");
  fixes.emplace_back("pad_multiple=1");
  fixes.emplace_back("require_seq_divisible=False");
  return Problem{
      .id = "CP011",
      .kind = base::ErrorKind::kInvalidArgument,
      .what = cat(name, " has S_local=", rows, " rows, not a multiple of pad_multiple=", policy.pad_multiple),
      .rule = "With auto_pad=False and no layout every shard must be one",
      .fix = join(fixes, ", or ")};
}

std::optional<Problem> check_shard_lengths(std::string_view name, std::span<const int64_t> lengths) {
  int64_t sum = 0;
  bool negative = false, overflow = false;
  for (const int64_t length : lengths) {
    negative = negative || length < 0;
    overflow = overflow || __builtin_add_overflow(sum, length, &sum);
  }
  std::string wrong;
  if (lengths.empty()) {
    wrong = " names no rank";
  } else if (negative) {
    wrong = " holds a negative length";
  } else if (overflow) {
    wrong = " adds up to more than 64 bits hold";
  } else if (sum == 0) {
    wrong = " holds no token at all";
  } else {
    return std::nullopt;
  }
  std::vector<int64_t> legal;  // what was given, made legal
  for (const int64_t length : lengths) legal.push_back(std::clamp<int64_t>(length, 0, INT32_MAX));
  if (legal.empty()) legal.push_back(1);
  if (std::all_of(legal.begin(), legal.end(), [](int64_t length) { return length == 0; })) legal.front() = 1;
  return Problem{.id = "CP012",
                 .kind = base::ErrorKind::kInvalidArgument,
                 .what = cat(name, "=[", join(lengths), ']', wrong),
                 .rule = "One length per rank, none negative, at least one token in all",
                 .fix = cat("lengths like [", join(legal), ']')};
}

std::optional<Problem> check_rank(std::string_view name, int64_t rank, int64_t cp_size) {
  if (rank >= 0 && rank < cp_size) return std::nullopt;
  return Problem{.id = "CP015",
                 .kind = base::ErrorKind::kInvalidArgument,
                 .what = cat(name, '=', rank, " is no rank of a group with cp_size=", cp_size),
                 .rule = "",
                 .fix = cat(name, " from 0 to ", std::max<int64_t>(cp_size - 1, 0))};
}

std::optional<Problem> check_head_counts(int64_t num_heads, int64_t num_kv_heads) {
  if (num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0) return std::nullopt;
  std::vector<std::string> fixes;
  if (num_heads > 0) fixes.push_back(cat("H_kv one of ", join(divisors(num_heads))));
  if (num_kv_heads > 0) {
    // The multiples of H_kv on both sides of H.
    const int64_t below = std::max<int64_t>(num_heads, 0) / num_kv_heads * num_kv_heads;
    std::vector<int64_t> legal;
    if (below > 0) legal.push_back(below);
    if (below <= INT64_MAX - num_kv_heads) legal.push_back(below + num_kv_heads);
    fixes.push_back(cat("H one of ", join(legal)));
  }
  if (fixes.empty()) fixes.emplace_back("H=1 and H_kv=1 or more");
  return Problem{.id = "CP023",
                 .kind = base::ErrorKind::kInvalidArgument,
                 .what = cat("H=", num_heads, " query heads cannot share H_kv=", num_kv_heads, " key/value heads"),
                 .rule = "Both must be positive and H a multiple of H_kv",
                 .fix = join(fixes, ", or ")};
}

Problem unknown_word(std::string_view id, std::string_view name, std::string_view value,
                     const std::vector<std::string_view>& known) {
  std::vector<std::string_view> sorted = known;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [value](std::string_view a, std::string_view b) { return distance(value, a) < distance(value, b); });
  std::vector<std::string> fixes;
  for (const std::string_view word : sorted) fixes.push_back(cat(name, "=\"", word, '"'));
  return {.id = std::string(id),
          .kind = base::ErrorKind::kInvalidArgument,
          .what = cat(name, "=\"", value, "\" is unknown"),
          .rule = known.empty() ? "Nothing is registered" : cat("Known: ", join(known)),
          .fix = join(fixes, " or ")};
}

}  // namespace ulysses::contract
