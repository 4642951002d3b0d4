#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "ulysses/exchange/group.h"

namespace ulysses::exchange {

// Remembers what was gathered of a tensor that many calls share, a mask, so that only the first of them communicates.
// An entry holds while the very same tensor object lives unchanged (its version counts writes); tensors without a
// version, made under inference mode, are never remembered. `key` is what else the result depends on: lengths, and
// which axes are gathered. How many are kept depends on the sequence of calls alone, never on when memory is freed:
// ranks that make the same calls find the same entries.
constexpr size_t kGathersKept = 16;  // per rank of a group

using GatherKey = std::vector<int64_t>;

bool is_gathered(const at::Tensor& tensor, const GatherKey& key, const Group& group);

// What gather() gave for this tensor and key before, or now. Comm: that of gather(), if it runs.
at::Tensor gather_once(const at::Tensor& tensor, const GatherKey& key, const Group& group,
                       const std::function<at::Tensor()>& gather);

}  // namespace ulysses::exchange
