#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ulysses/contract/policy.h"

namespace ulysses::partition {

// What `ulysses-check` and `ulysses check` ask: would this model run on so many ranks, and who would hold what.
struct CheckRequest {
  int64_t seq_len = 0;                       // tokens
  int64_t cp_size = 1;                       // ranks
  std::optional<int64_t> num_heads = {};     // absent: no head columns
  std::optional<int64_t> num_kv_heads = {};  // absent: as num_heads
  contract::UlyssesContextParallelPolicy policy = {};
  std::vector<std::string> known_backends = {"ulysses"};  // registries live above this layer
};

// All problems with ids and fixes, legal lengths and degrees near by, and a table rank → tokens → rows → heads.
// Sets *exit_code to 0 if there is no problem, else to 1. Never throws for any request.
std::string check_report(const CheckRequest& request, int* exit_code);

}  // namespace ulysses::partition
