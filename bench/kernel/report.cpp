#include "bench/kernel/report.h"

#include <algorithm>
#include <cstdio>
#include <limits>

namespace ulysses::bench {
namespace {

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

double gflops(const Row& row, double seconds) { return row.flops() / seconds * 1e-9; }

// Asked of whatever kernel="auto" takes, on any processor.
constexpr double kLeastRatio = 0.98;
// The least ratio that is asked of one thread, from 256 tokens on.
struct Target {
  const char* dtype;
  const char* direction;
  double ratio;
};
constexpr Target kTargets[] = {{"bfloat16", "forward", 2.2},        {"float32", "forward", 1.2},
                               {"bfloat16", "backward", 1.5},       {"float32", "backward", 1.1},
                               {"float16", "forward", kLeastRatio}, {"float16", "backward", kLeastRatio}};
constexpr double kMostRms = 1.1;  // times torch's error, from 1024 tokens on
constexpr double kMostOtherLoad = 0.5;
constexpr double kLeastScaling = 1.8;  // two threads against one, from 1024 tokens on

std::string line(bool holds, const std::string& text) {
  return std::string(holds ? "- holds: " : "- FAILS: ") + text + "\n";
}

// The least speed-up of two threads over one among the long rows; infinity where there is no such pair.
double least_scaling(const std::vector<Row>& rows) {
  double least = std::numeric_limits<double>::infinity();
  for (const Row& one : rows) {
    for (const Row& two : rows) {
      if (one.threads != 1 || two.threads != 2 || one.seq_len < 1024) continue;
      if (one.dtype == two.dtype && one.direction == two.direction && one.head_dim == two.head_dim &&
          one.seq_len == two.seq_len)
        least = std::min(least, one.own_seconds / two.own_seconds);
    }
  }
  return least;
}

}  // namespace

double Row::flops() const {
  const double products = direction == "forward" ? 4.0 : 10.0;
  return products * static_cast<double>(num_heads * seq_len * seq_len * head_dim);
}

std::string markdown(const std::vector<Row>& rows) {
  std::string text =
      "| kernel | dtype | direction | threads | D | S | torch GFLOP/s | own GFLOP/s | ratio | rms error, own / torch | "
      "max error, own / torch | lse error, own / torch |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const Row& row : rows) {
    text += format("| %s | %s | %s | %ld | %ld | %ld | %.0f | %.0f | %.2f | ", row.kernel.c_str(), row.dtype.c_str(),
                   row.direction.c_str(), row.threads, row.head_dim, row.seq_len, gflops(row, row.torch_seconds),
                   gflops(row, row.own_seconds), row.ratio());
    text += row.has_errors
                ? format("%.1e / %.1e | %.1e / %.1e | ", row.own_rms, row.torch_rms, row.own_max, row.torch_max)
                : std::string(" | | ");
    text += row.direction == "forward" ? format("%.1e / %.1e |\n", row.own_lse, row.torch_lse) : std::string(" |\n");
  }
  return text;
}

std::string json(const std::vector<Row>& rows, const std::string& processor) {
  std::string text = format("{\"processor\": \"%s\", \"rows\": [", processor.c_str());
  for (const Row& row : rows) {
    text += format(
        "%s\n  {\"kernel\": \"%s\", \"dtype\": \"%s\", \"direction\": \"%s\", \"threads\": %ld, "
        "\"head_dim\": %ld, \"seq_len\": %ld, \"num_heads\": %ld, \"own_seconds\": %.9f, \"torch_seconds\": %.9f",
        &row == rows.data() ? "" : ",", row.kernel.c_str(), row.dtype.c_str(), row.direction.c_str(), row.threads,
        row.head_dim, row.seq_len, row.num_heads, row.own_seconds, row.torch_seconds);
    if (row.has_errors)
      text += format(", \"own_rms\": %.3e, \"torch_rms\": %.3e, \"own_max\": %.3e, \"torch_max\": %.3e", row.own_rms,
                     row.torch_rms, row.own_max, row.torch_max);
    if (row.direction == "forward")
      text += format(", \"own_lse\": %.3e, \"torch_lse\": %.3e", row.own_lse, row.torch_lse);
    text += "}";
  }
  return text + "\n]}\n";
}

std::string verdict(const std::vector<Row>& rows, bool has_targets, double other_load, bool* all_hold) {
  std::string text;
  *all_hold = true;
  const auto add = [&](bool holds, const std::string& words) {
    text += line(holds, words);
    *all_hold = *all_hold && holds;
  };
  for (const Target& target : kTargets) {
    double least = std::numeric_limits<double>::infinity(), worst_rms = 0.0;
    for (const Row& row : rows) {
      if (row.dtype != target.dtype || row.direction != target.direction || row.threads != 1 || !row.is_auto) continue;
      least = std::min(least, row.ratio());
      if (row.seq_len >= 1024 && row.has_errors) worst_rms = std::max(worst_rms, row.own_rms / row.torch_rms);
    }
    if (least == std::numeric_limits<double>::infinity()) continue;
    const double ratio = has_targets ? target.ratio : kLeastRatio;
    add(least >= ratio,
        format("%s %s at least %.2f times torch's speed: %.2f", target.dtype, target.direction, ratio, least));
    if (worst_rms > 0.0)
      add(worst_rms <= kMostRms, format("%s %s rms error at most %.1f times torch's: %.2f", target.dtype,
                                        target.direction, kMostRms, worst_rms));
  }
  for (const Row& row : rows) {
    if (row.is_auto || row.threads != 1) continue;
    text += format("- not judged, kernel=\"auto\" leaves it out: %s %s D=%ld S=%ld at %.2f times torch's speed\n",
                   row.dtype.c_str(), row.direction.c_str(), row.head_dim, row.seq_len, row.ratio());
  }
  const double scaling = least_scaling(rows);
  if (!has_targets || scaling == std::numeric_limits<double>::infinity()) return text;
  if (other_load > kMostOtherLoad) {
    text += format("- not judged: two threads at least %.1f times one: %.2f, while others ran %.1f threads\n",
                   kLeastScaling, scaling, other_load);
  } else {
    add(scaling >= kLeastScaling, format("two threads at least %.1f times one: %.2f", kLeastScaling, scaling));
  }
  return text;
}

}  // namespace ulysses::bench
