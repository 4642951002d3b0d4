#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ulysses/contract/attention_spec.h"

namespace ulysses::contract {

// What the ranks of a group must agree on before data moves, as text, so that a difference names its field.

using FingerprintFields = std::vector<std::pair<std::string, std::string>>;

// Everything that must be equal on every rank: op, options, dtype, shapes, policy, layouts, requires_grad. Left out is
// what may differ: the rank, the layout's own cp_rank, the device's index, and the local lengths where a layout or the
// uneven policy allows them to. `requires_grad_mask`: RequiresGrad. Safe for any spec.
FingerprintFields fingerprint_fields(const AttentionSpec& spec, int64_t requires_grad_mask);

// One "field=value\n" line per field; newlines and backslashes in values are escaped.
std::string fingerprint_text(const FingerprintFields& fields);

// The text of a rank whose own validation failed: it still takes part, so that nobody waits, and every rank learns
// what is wrong. Starts with "error=".
std::string failed_fingerprint(const std::vector<base::Problem>& problems);

// Compares the texts of all ranks, in rank order; every rank computes the same answer. Empty if all agree. Else
//   the problems of ranks that failed, under their own ids and naming the ranks unless all of them failed alike;
//   or CP013, when only the local lengths differ without a layout: all lengths are listed;
//   or CP060 for each field that differs: the ranks, the field and every value.
std::vector<base::Problem> compare_fingerprints(const std::vector<std::string>& texts);

// FNV-1a, 64 bits: equal for equal texts on every rank, whatever it was compiled with.
uint64_t fingerprint_hash(std::string_view text);

}  // namespace ulysses::contract
