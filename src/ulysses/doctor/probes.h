#pragma once

#include <functional>

#include "ulysses/doctor/examiner.h"
#include "ulysses/doctor/report.h"

namespace ulysses::doctor {

// One closed form that a right attention keeps, asked of the plain case of one strategy and number of ranks.
struct Probe {
  std::string_view name;
  // Fills verdict and detail, and returns what is wrong, if anything.
  Diagnosis (*run)(Examiner& examiner, const Case& plain, ProbeResult& result);
};

// state, reach, causal_reach, cross_reach, uniform, identity, kv_heads, linearity, duality, dropout_duality,
// shard_invariance, batch_permutation, head_permutation, stride, large_scores, desync, communication.
const std::vector<Probe>& all_probes();

}  // namespace ulysses::doctor
