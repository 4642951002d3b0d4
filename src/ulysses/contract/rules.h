#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ulysses/base/error.h"
#include "ulysses/contract/policy.h"

namespace ulysses::contract {

// Rules that more than one entry point needs; each id has its text in one place. All are pure and safe for any input.

// A problem of kind kInvalidArgument.
base::Problem invalid(std::string_view id, std::string what, std::string_view rule, std::string fix);

// Adds what a rule found, if anything.
void add(std::vector<base::Problem>& problems, std::optional<base::Problem> problem);

// What a rule found, as a list of one or none.
std::vector<base::Problem> to_list(std::optional<base::Problem> problem);

// a * b or the next multiple, or nothing when it does not fit int64. Arguments must be positive.
std::optional<int64_t> checked_multiply(int64_t a, int64_t b);
std::optional<int64_t> checked_round_up(int64_t value, int64_t multiple);

// CP007: `number` does not fit int64: Python's integers have no bound, ours do.
base::Problem not_64_bit(std::string_view number);

// CP006: `name` must be positive. `fix` names a value that works.
std::optional<base::Problem> check_positive(std::string_view name, int64_t value, std::string_view fix);

// CP007, CP010 or CP011 for one length of positive size; nothing when the policy does not require divisibility.
// `name` is what the caller calls the length ("seq_len", "kv_seq_len"). With `offer_auto_pad` the fix also names
// auto_pad=True: right where strict mode refuses, wrong for check_config, which looks at the raw length.
std::vector<base::Problem> check_divisible(const UlyssesContextParallelPolicy& policy, std::string_view name,
                                           int64_t seq_len, int64_t cp_size, bool offer_auto_pad);

// CP011: strict mode without a layout; every rank's rows must be a multiple of pad_multiple.
std::optional<base::Problem> check_local_rows(const UlyssesContextParallelPolicy& policy, std::string_view name,
                                              int64_t rows, int64_t cp_size);

// CP012: lengths that no layout can have: none, a negative one, a sum of zero, or one beyond int64.
std::optional<base::Problem> check_shard_lengths(std::string_view name, std::span<const int64_t> lengths);

// CP015: a rank outside [0, cp_size).
std::optional<base::Problem> check_rank(std::string_view name, int64_t rank, int64_t cp_size);

// CP023: H and H_kv positive and H % H_kv == 0. The fix lists the legal values of both.
std::optional<base::Problem> check_head_counts(int64_t num_heads, int64_t num_kv_heads);

// CP001, CP030, CP031, CP033: `value` must be one of `known`. The fix lists them, the likeliest first.
template <typename Words>
std::optional<base::Problem> check_word(std::string_view id, std::string_view name, std::string_view value,
                                        const Words& known);

// The non-template part of check_word.
base::Problem unknown_word(std::string_view id, std::string_view name, std::string_view value,
                           const std::vector<std::string_view>& known);

template <typename Words>
std::optional<base::Problem> check_word(std::string_view id, std::string_view name, std::string_view value,
                                        const Words& known) {
  for (const auto& word : known) {
    if (value == word) return std::nullopt;
  }
  return unknown_word(id, name, value, std::vector<std::string_view>(std::begin(known), std::end(known)));
}

}  // namespace ulysses::contract
