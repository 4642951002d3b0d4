#include "ulysses/contract/fingerprint.h"

#include <array>
#include <cstdio>

#include "ulysses/base/text.h"

namespace ulysses::contract {
namespace {

using base::cat;
using base::join;

std::string flag(bool value) { return value ? "True" : "False"; }

std::string exact(const std::optional<double>& value) {
  if (!value) return "None";
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.17g", *value);
  return text.data();
}

std::string layout_text(const std::optional<LayoutSpec>& layout) {
  if (!layout) return "None";
  std::string text = cat("lengths [", join(layout->lengths), ']');
  if (layout->padded_lengths != layout->lengths) text += cat(", padded [", join(layout->padded_lengths), ']');
  return text + cat(", order ", layout->order);
}

// The device without its index: "cuda:1" and "cuda:0" are legal neighbours.
std::string device_type(const std::string& device) { return device.substr(0, device.find(':')); }

void add_policy(FingerprintFields& fields, const UlyssesContextParallelPolicy& policy) {
  fields.emplace_back("policy.backend_name", policy.backend_name);
  fields.emplace_back("policy.require_seq_divisible", flag(policy.require_seq_divisible));
  fields.emplace_back("policy.auto_pad", flag(policy.auto_pad));
  fields.emplace_back("policy.pad_multiple", cat(policy.pad_multiple));
  fields.emplace_back("policy.kv_must_be_global", flag(policy.kv_must_be_global));
  fields.emplace_back("policy.output_restore_dim", cat(policy.output_restore_dim));
  fields.emplace_back("policy.base_processor", policy.base_processor);
  fields.emplace_back("policy.required_checks", join(policy.required_checks));
}

// A missing axis of a tensor that is not 4-D: such a call is refused, it need not be described.
std::string axis(const TensorSpec& tensor, size_t index) {
  return index < tensor.sizes.size() ? cat(tensor.sizes[index]) : "None";
}

void add_shapes(FingerprintFields& fields, const AttentionSpec& spec) {
  fields.emplace_back("batch", axis(spec.q, 0));
  fields.emplace_back("num_heads", axis(spec.q, 2));
  fields.emplace_back("num_kv_heads", axis(spec.k, 2));
  fields.emplace_back("head_dim", axis(spec.q, 3));
  fields.emplace_back("v_head_dim", axis(spec.v, 3));
  fields.emplace_back("dtype", spec.q.dtype);
  fields.emplace_back("device_type", device_type(spec.q.device));
  fields.emplace_back("layout", layout_text(spec.layout));
  const bool replicated = spec.kv_role == "replicated";
  fields.emplace_back("kv_layout", layout_text(spec.kv_layout));
  if (spec.policy.sequence_mode() == SequenceMode::kUneven || spec.layout) return;
  fields.emplace_back("seq_len_local", axis(spec.q, 1));
  if (!spec.kv_layout && !replicated) fields.emplace_back("kv_len_local", axis(spec.k, 1));
}

// Replicated keys have one length on every rank, whatever the layout.
std::string kv_role_text(const AttentionSpec& spec) {
  return spec.kv_role == "replicated" ? cat("replicated, S_kv=", axis(spec.k, 1)) : spec.kv_role;
}

// What only some calls have; left out of every other fingerprint.
void add_extras(FingerprintFields& fields, const AttentionSpec& spec) {
  if (spec.softcap) fields.emplace_back("softcap", exact(spec.softcap));
  if (spec.sinks) fields.emplace_back("sinks", spec.sinks->dtype);
  if (spec.joint_len > 0) {
    fields.emplace_back("joint_len", cat(spec.joint_len));
    fields.emplace_back("joint.position", spec.joint_position);
    fields.emplace_back("joint.valid_lens", join(spec.joint_valid_lens));
  }
  if (!spec.attn_mask || spec.attn_mask->sizes.empty()) return;
  const MaskAxes axes = mask_axes(spec);
  const bool is_4d = spec.attn_mask->sizes.size() == 4;
  fields.emplace_back("attn_mask.dtype", spec.attn_mask->dtype);
  fields.emplace_back("attn_mask.batch", cat(spec.attn_mask->sizes[0]));
  fields.emplace_back("attn_mask.num_heads", cat(is_4d ? spec.attn_mask->sizes[1] : 1));
  fields.emplace_back("attn_mask.axes", cat(to_string(axes.q), ", ", to_string(axes.kv)));
  fields.emplace_back("attn_mask.is_gathered", flag(spec.mask_is_gathered));
}

std::string requires_grad_text(int64_t mask) {
  std::vector<std::string_view> names;
  if (mask & kGradQ) names.emplace_back("q");
  if (mask & kGradK) names.emplace_back("k");
  if (mask & kGradV) names.emplace_back("v");
  if (mask & kGradMask) names.emplace_back("attn_mask");
  if (mask & kGradSinks) names.emplace_back("sinks");
  return names.empty() ? "none" : join(names);
}

}  // namespace

FingerprintFields fingerprint_fields(const AttentionSpec& spec, int64_t requires_grad_mask) {
  FingerprintFields fields;
  fields.reserve(40);
  fields.emplace_back("op", spec.op);
  fields.emplace_back("cp_size", cat(spec.cp_size));
  add_shapes(fields, spec);
  fields.emplace_back("requires_grad", requires_grad_text(requires_grad_mask));
  fields.emplace_back("strategy", spec.strategy);
  fields.emplace_back("kernel", spec.kernel);
  fields.emplace_back("agreement", spec.agreement);
  fields.emplace_back("qkv_format", spec.qkv_format);
  fields.emplace_back("kv_role", kv_role_text(spec));
  fields.emplace_back("causal_alignment", spec.causal_alignment);
  fields.emplace_back("outer", spec.outer);
  fields.emplace_back("is_causal", flag(spec.is_causal));
  fields.emplace_back("return_lse", flag(spec.return_lse));
  fields.emplace_back("softmax_scale", exact(spec.softmax_scale));
  add_extras(fields, spec);
  std::vector<std::string_view> requested;
  for (const Feature feature : spec.requested) requested.push_back(to_string(feature));
  fields.emplace_back("requested", join(requested));
  add_policy(fields, spec.policy);
  return fields;
}

uint64_t fingerprint_hash(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char character : text) {
    hash ^= static_cast<unsigned char>(character);
    hash *= 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace ulysses::contract
