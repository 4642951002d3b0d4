#include "ulysses/contract/checklist.h"

#include <array>

#include "ulysses/base/text.h"

namespace ulysses::contract {
namespace {

constexpr std::array kPoints = std::to_array<ChecklistPoint>({
    {"the length divides, or is padded, and padding takes no weight",
     "`seq_divisible`: CP010, CP011; `ulysses doctor`"},
    {"K and V are global: a query sees the keys of every rank",
     "`kv_global_gathered`: CP053 for an overridden exchange; `ulysses doctor` and `check_attention` for the rest"},
    {"the output is restored on the sequence dimension, in token order",
     "`output_restore_dim`: CP005, CP052; `ulysses doctor`"},
    {"the backend inherits `UlyssesAttentionProcessor`", "registration: CP051"},
    {"gradients of K and V are summed over the group, and belong to the forward",
     "the base class's exchange; `ulysses doctor` for everything else"},
    {"one policy and one call, agreed on by all ranks; every rank raises, or none",
     "agreement: CP060; `ulysses doctor`"},
    {"causal and masks go by the position in the whole sequence", "the strategies; `ulysses doctor`"},
    {"each query head reads its own KV head, and every key counts once", "the strategies; `ulysses doctor`"},
    {"nothing is kept between calls, no input is written, any strides are read", "`ulysses doctor`"},
    {"softmax_scale, the row maximum, float32 sums and a natural-log lse", "the kernels; `ulysses doctor`"},
});

}  // namespace

std::span<const ChecklistPoint> checklist() { return kPoints; }

std::string checklist_text(int64_t number) {
  if (number < 1 || number > std::ssize(kPoints)) return "";
  return base::cat(number, ". ", kPoints[static_cast<size_t>(number - 1)].point);
}

std::string render_checklist() {
  std::string text = "\n## Checklist\n\n| | point | enforced by |\n|---|---|---|\n";
  for (size_t i = 0; i < kPoints.size(); ++i)
    text += base::cat("| ", i + 1, " | ", kPoints[i].point, " | ", kPoints[i].enforced_by, " |\n");
  return text;
}

}  // namespace ulysses::contract
