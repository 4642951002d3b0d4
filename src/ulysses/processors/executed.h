#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "ulysses/contract/attention_spec.h"

namespace ulysses::processors {

// Which cells of the capability table were executed, for the tests that ask whether every supported one is: calls that
// passed every check on every rank, counted on rank 0. Of this process.
struct ExecutedCalls {
  int64_t all = 0;
  int64_t training = 0;  // of them with an input that requires a gradient
};
using Executed = std::map<std::pair<std::string, contract::Feature>, ExecutedCalls>;  // (strategy, feature)

// On: starts afresh. Off, as it is unless a test asks, a call costs one relaxed load more.
void record_executed(bool on);
Executed executed();

// Called once a call, when nothing can refuse it any more.
void note_executed(const contract::AttentionSpec& spec, int64_t requires_grad_mask);

}  // namespace ulysses::processors
