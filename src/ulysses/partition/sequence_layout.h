#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "ulysses/contract/policy.h"
#include "ulysses/partition/head_ranges.h"

namespace ulysses::partition {

enum class TokenOrder { kContiguous };

// "contiguous". Errors: CP049 for "head_tail", which no strategy serves yet; CP033 for another word.
TokenOrder token_order(std::string_view word);

// `tokens` cut into one run per rank, balanced within one, the first ranks the longer ones.
std::vector<int64_t> balanced_lengths(int64_t tokens, int64_t cp_size);

// Which rank holds which tokens. A value; any length, also shorter than the rank count.
// Units: tokens. Errors: CP002–CP007 (policy, sizes), CP010, CP011 (strict mode), CP012 (lengths), CP015 (cp_rank).
class SequenceLayout {
 public:
  // Lengths by the policy's sequence mode: pad (equal shards, padding at the end of the sequence), strict (equal
  // shards or an error), uneven (balanced within one, no padding).
  SequenceLayout(int64_t seq_len, int64_t cp_size, const contract::UlyssesContextParallelPolicy& policy = {},
                 std::optional<int64_t> cp_rank = std::nullopt);

  // Shards made elsewhere, in rank order.
  static SequenceLayout from_lengths(std::vector<int64_t> lengths, std::optional<int64_t> cp_rank = std::nullopt);

  int64_t seq_len() const;
  int64_t cp_size() const { return static_cast<int64_t>(lengths_.size()); }
  const std::vector<int64_t>& lengths() const { return lengths_; }                // real tokens per rank
  const std::vector<int64_t>& padded_lengths() const { return padded_lengths_; }  // rows per rank
  std::optional<int64_t> cp_rank() const { return cp_rank_; }
  TokenOrder order() const { return TokenOrder::kContiguous; }

  Range tokens(int64_t rank) const;                    // global positions of the rank's real tokens
  std::vector<int64_t> positions(int64_t rank) const;  // per local row; −1 for padding

  bool operator==(const SequenceLayout&) const = default;

 private:
  SequenceLayout() = default;
  std::vector<int64_t> lengths_;
  std::vector<int64_t> padded_lengths_;
  std::optional<int64_t> cp_rank_;
};

}  // namespace ulysses::partition
