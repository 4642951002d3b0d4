#include "ulysses/partition/sequence_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/contract/capability.h"
#include "ulysses/contract/rules.h"

namespace ulysses::partition {
namespace {

using contract::SequenceMode;
using contract::UlyssesContextParallelPolicy;
using Problems = std::vector<base::Problem>;

constexpr std::string_view kOp = "SequenceLayout";

// Divisibility is an error only in strict mode; pad mode needs the padded length to fit.
void check(const UlyssesContextParallelPolicy& policy, int64_t seq_len, int64_t cp_size,
           std::optional<int64_t> cp_rank) {
  const bool strict = policy.sequence_mode() == SequenceMode::kStrict;
  Problems problems = contract::check_policy(policy);
  contract::add(problems, contract::check_positive("seq_len", seq_len, "seq_len=1 or more"));
  contract::add(problems, contract::check_positive("cp_size", cp_size, "cp_size=1 or more"));
  for (base::Problem& problem : contract::check_divisible(policy, "seq_len", seq_len, cp_size, strict)) {
    if (strict || problem.id == "CP007") problems.push_back(std::move(problem));
  }
  if (cp_rank && cp_size > 0) contract::add(problems, contract::check_rank("cp_rank", *cp_rank, cp_size));
  base::raise_if_any(std::move(problems), kOp);
}

}  // namespace

TokenOrder token_order(std::string_view word) {
  if (word == "contiguous") return TokenOrder::kContiguous;
  if (word == "head_tail") {
    const contract::Capability& cell = contract::capability("ulysses", contract::Feature::kHeadTailOrder);
    throw base::Error({{std::string(cell.id), base::ErrorKind::kUnsupported, "order=head_tail is not offered", "",
                        "order=\"contiguous\""}},
                      kOp);
  }
  throw base::Error({contract::invalid("CP033", base::cat("order=", word, " is unknown"), "Known: contiguous",
                                       "order=\"contiguous\"")},
                    kOp);
}

std::vector<int64_t> balanced_lengths(int64_t tokens, int64_t cp_size) {
  std::vector<int64_t> lengths(static_cast<size_t>(cp_size), tokens / cp_size);
  for (int64_t rank = 0; rank < tokens % cp_size; ++rank) ++lengths[static_cast<size_t>(rank)];
  return lengths;
}

SequenceLayout::SequenceLayout(int64_t seq_len, int64_t cp_size, const UlyssesContextParallelPolicy& policy,
                               std::optional<int64_t> cp_rank)
    : cp_rank_(cp_rank) {
  check(policy, seq_len, cp_size, cp_rank);
  const auto ranks = static_cast<size_t>(cp_size);
  if (policy.sequence_mode() == SequenceMode::kUneven) {
    lengths_ = balanced_lengths(seq_len, cp_size);
    padded_lengths_ = lengths_;
    return;
  }
  const int64_t rows = policy.padded_seq_len(seq_len, cp_size) / cp_size;
  padded_lengths_.assign(ranks, rows);
  int64_t left = seq_len;
  for (size_t rank = 0; rank < ranks; ++rank) {
    lengths_.push_back(std::min(rows, left));
    left -= lengths_.back();
  }
}

SequenceLayout SequenceLayout::from_lengths(std::vector<int64_t> lengths, std::optional<int64_t> cp_rank) {
  Problems problems;
  contract::add(problems, contract::check_shard_lengths("lengths", lengths));
  const auto ranks = static_cast<int64_t>(lengths.size());
  if (cp_rank && ranks > 0) contract::add(problems, contract::check_rank("cp_rank", *cp_rank, ranks));
  base::raise_if_any(std::move(problems), kOp);
  SequenceLayout layout;
  layout.padded_lengths_ = lengths;
  layout.lengths_ = std::move(lengths);
  layout.cp_rank_ = cp_rank;
  return layout;
}

int64_t SequenceLayout::seq_len() const { return std::accumulate(lengths_.begin(), lengths_.end(), int64_t{0}); }

Range SequenceLayout::tokens(int64_t rank) const {
  if (auto problem = contract::check_rank("rank", rank, cp_size())) throw base::Error({*std::move(problem)}, kOp);
  const int64_t begin = std::accumulate(lengths_.begin(), lengths_.begin() + rank, int64_t{0});
  return {begin, begin + lengths_[static_cast<size_t>(rank)]};
}

std::vector<int64_t> SequenceLayout::positions(int64_t rank) const {
  const Range own = tokens(rank);
  std::vector<int64_t> positions(static_cast<size_t>(padded_lengths_[static_cast<size_t>(rank)]), -1);
  std::iota(positions.begin(), positions.begin() + own.size(), own.begin);
  return positions;
}

}  // namespace ulysses::partition
