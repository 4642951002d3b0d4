#include "ulysses/doctor/finding.h"

#include <algorithm>
#include <array>

namespace ulysses::doctor {
namespace {

constexpr std::string_view kChecklist = "docs/guide.md#checklist";
constexpr std::string_view kLocal = "docs/guide.md#the-loss-is-too-high-and-there-is-no-error";
constexpr std::string_view kHangs = "docs/guide.md#it-hangs-or-the-process-dies-inside-gloo";
constexpr std::string_view kOrder = "docs/guide.md#right-shapes-wrong-numbers-and-no-layout";

struct Kind {
  std::string_view name;
  int64_t point;  // number in contract::checklist()
  std::string_view anchor;
};

constexpr std::array kKinds = std::to_array<Kind>({
    {"crashed", 6, kHangs},
    {"hung", 6, kHangs},
    {"one_rank_only", 6, kHangs},
    {"unclear_message", 6, kChecklist},
    {"desync", 6, kHangs},
    {"nothing_served", 4, kChecklist},
    {"input_written", 9, kChecklist},
    {"kv_content", 2, kLocal},
    {"form", 3, kChecklist},
    {"state", 9, kChecklist},
    {"not_finite", 10, kChecklist},
    {"heads_for_tokens", 3, kOrder},
    {"local_only", 2, kLocal},
    {"values_local", 2, kLocal},
    {"keys_local", 2, kLocal},
    {"own_left_out", 2, kLocal},
    {"rank_groups", 2, kLocal},
    {"tail_dropped", 1, kChecklist},
    {"missing_keys", 2, kLocal},
    {"padding_counts", 1, kChecklist},
    {"text_counts_twice", 8, kChecklist},
    {"text_local", 2, kLocal},
    {"text_lens_ignored", 7, kChecklist},
    {"mask_ignored", 7, kChecklist},
    {"mask_as_bias", 7, kChecklist},
    {"mask_inverted", 7, kChecklist},
    {"mask_heads", 7, kChecklist},
    {"mask_rows", 7, kChecklist},
    {"mask_local", 7, kChecklist},
    {"sinks_ignored", 10, kChecklist},
    {"sinks_of_one_rank", 10, kChecklist},
    {"sinks_count_twice", 10, kChecklist},
    {"softcap_ignored", 10, kChecklist},
    {"softcap_after_mask", 10, kChecklist},
    {"causal_text", 7, kChecklist},
    {"causal_ignored", 7, kChecklist},
    {"causal_unasked", 7, kChecklist},
    {"causal_local", 7, kChecklist},
    {"causal_alignment", 7, kChecklist},
    {"causal_offset", 7, kChecklist},
    {"leaked_keys", 7, kChecklist},
    {"doubled_keys", 2, kLocal},
    {"other_weights", 2, kLocal},
    {"kv_heads", 8, kChecklist},
    {"batch_mixed", 3, kOrder},
    {"rank_order", 3, kOrder},
    {"head_order", 3, kOrder},
    {"token_order", 3, kOrder},
    {"heads_and_tokens", 3, kOrder},
    {"strides", 9, kOrder},
    {"scale", 10, kChecklist},
    {"scale_ignored", 10, kChecklist},
    {"dropout", 10, kChecklist},
    {"dropout_backward", 5, kChecklist},
    {"overflow", 10, kChecklist},
    {"precision", 10, kChecklist},
    {"lse_base", 10, kChecklist},
    {"lse_local", 10, kChecklist},
    {"lse_counts_twice", 8, kChecklist},
    {"lse_sinks", 10, kChecklist},
    {"lse", 10, kChecklist},
    {"no_gradient", 5, kChecklist},
    {"gradient_not_reduced", 5, kChecklist},
    {"gradient_of_one_rank", 5, kChecklist},
    {"gradient_factor", 5, kChecklist},
    {"lse_gradient", 5, kChecklist},
    {"option_backward", 5, kChecklist},
    {"other_backward", 5, kChecklist},
    {"gradient", 5, kChecklist},
    {"numbers", 10, kChecklist},
    {"no_communication", 2, kLocal},
});

const Kind* find_kind(std::string_view name) {
  const auto* found = std::find_if(kKinds.begin(), kKinds.end(), [&](const Kind& kind) { return kind.name == name; });
  return found == kKinds.end() ? nullptr : found;
}

}  // namespace

int64_t Finding::checklist_point() const {
  const Kind* found = find_kind(kind);
  return found == nullptr ? 0 : found->point;
}

std::string Finding::anchor() const {
  const Kind* found = find_kind(kind);
  return std::string(found == nullptr ? kChecklist : found->anchor);
}

}  // namespace ulysses::doctor
