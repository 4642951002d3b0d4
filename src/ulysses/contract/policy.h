#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ulysses/base/error.h"

namespace ulysses::contract {

// How shard lengths follow from a sequence length.
enum class SequenceMode {
  kPad,     // pad the end of the sequence to equal shards; padding never reaches a kernel
  kStrict,  // refuse a length that does not divide, naming one that does
  kUneven,  // exact lengths, no padding
};

// The single source of truth for how context parallelism is done. A value type; every field steers behaviour or is
// refused. Rendered into the guide by policy_fields().
struct UlyssesContextParallelPolicy {
  std::string backend_name = "ulysses";
  bool require_seq_divisible = true;
  bool auto_pad = true;
  int64_t pad_multiple = 8;
  bool kv_must_be_global = true;
  int64_t output_restore_dim = 1;
  std::string base_processor = "UlyssesAttentionProcessor";
  std::vector<std::string> required_checks = {"seq_divisible", "kv_global_gathered", "output_restore_dim"};

  // Next multiple of cp_size * pad_multiple, or seq_len itself if divisibility is not required.
  // Errors: CP006 for a length, cp_size or pad_multiple ≤ 0; CP007 when the result overflows int64.
  int64_t padded_seq_len(int64_t seq_len, int64_t cp_size) const;

  // Every problem of this policy with the *raw* length, as text; empty if none. Never throws.
  std::vector<std::string> validate_config(int64_t seq_len, int64_t cp_size) const;

  SequenceMode sequence_mode() const;

  bool operator==(const UlyssesContextParallelPolicy&) const = default;
};

// The dimension of [B, S, H, D] tensors in a qkv_format that holds the sequence: 1 for bshd, 2 for bhsd, 0 for sbhd.
int64_t sequence_dim(std::string_view qkv_format);

// The problems behind validate_config(): the policy's own fields (CP001–CP005), sizes (CP006, CP007), divisibility
// (CP010, CP011).
std::vector<base::Problem> check_config(const UlyssesContextParallelPolicy& policy, int64_t seq_len, int64_t cp_size);

// The problems of the policy's own fields alone (CP002–CP007), whatever the length. The backend's name is checked
// where backends are registered.
std::vector<base::Problem> check_policy(const UlyssesContextParallelPolicy& policy);

// One line per field for the guide and the Python docstring.
struct PolicyField {
  std::string_view name;
  std::string_view default_text;
  std::string_view meaning;
};
std::span<const PolicyField> policy_fields();

// The names that required_checks must hold, no more and no fewer.
std::span<const std::string_view> known_checks();

}  // namespace ulysses::contract
