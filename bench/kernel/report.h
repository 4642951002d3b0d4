#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ulysses::bench {

// One call of both kernels. Times are the shortest of many, measured in turns.
struct Row {
  std::string dtype, direction;  // "forward" or "backward"
  std::string kernel;            // ours; cpu_fused where cpu_flash cannot run
  bool is_auto = true;           // kernel="auto" takes it here
  int64_t threads = 1, head_dim = 0, seq_len = 0, num_heads = 0;
  double own_seconds = 0.0, torch_seconds = 0.0;
  double own_rms = 0.0, torch_rms = 0.0;  // errors against float64: of out, or of the worst of dq, dk and dv
  double own_max = 0.0, torch_max = 0.0;
  double own_lse = 0.0, torch_lse = 0.0;  // largest; forward only
  bool has_errors = true;                 // false: float64 would need too much memory

  double flops() const;  // of a call without a mask: 4 · H · S² · D, backward 10
  double ratio() const { return torch_seconds / own_seconds; }
};

std::string markdown(const std::vector<Row>& rows);
std::string json(const std::vector<Row>& rows, const std::string& processor);

// What holds on this machine, one line per target; `all_hold` says whether all that were judged do.
// other_load: threads of others that were running; the scaling to two threads is judged where there were none.
// has_targets: the processor is one of those whose speed-up is promised; on others what auto takes may be slower than
// torch's op by 2 % at most.
std::string verdict(const std::vector<Row>& rows, bool has_targets, double other_load, bool* all_hold);

}  // namespace ulysses::bench
