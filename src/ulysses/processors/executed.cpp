#include "ulysses/processors/executed.h"

#include <atomic>
#include <mutex>

namespace ulysses::processors {
namespace {

std::atomic<bool> is_on{false};
std::mutex mutex;

Executed& counts() {
  static Executed found;
  return found;
}

}  // namespace

void record_executed(bool on) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (on) counts().clear();
  is_on.store(on, std::memory_order_relaxed);
}

Executed executed() {
  const std::lock_guard<std::mutex> lock(mutex);
  return counts();
}

void note_executed(const contract::AttentionSpec& spec, int64_t requires_grad_mask) {
  if (!is_on.load(std::memory_order_relaxed) || spec.cp_rank != 0) return;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const contract::Feature feature : contract::features_of(spec)) {
    ExecutedCalls& calls = counts()[{spec.strategy, feature}];
    ++calls.all;
    if (requires_grad_mask != 0) ++calls.training;
  }
}

}  // namespace ulysses::processors
