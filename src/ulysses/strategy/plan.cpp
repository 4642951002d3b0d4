#include "ulysses/strategy/plan.h"

#include <cmath>
#include <numeric>

namespace ulysses::strategy {
namespace {

int64_t sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

std::vector<int64_t> lengths_of(const std::optional<contract::LayoutSpec>& layout, int64_t local_rows, int64_t cp_size,
                                const std::vector<std::vector<int64_t>>& exchanged, size_t column) {
  if (layout) return layout->lengths;
  if (exchanged.empty()) return std::vector<int64_t>(static_cast<size_t>(cp_size), local_rows);
  std::vector<int64_t> lengths;
  for (const std::vector<int64_t>& row : exchanged) lengths.push_back(row[column]);
  return lengths;
}

}  // namespace

int64_t AttentionPlan::begin() const { return std::accumulate(lengths.begin(), lengths.begin() + cp_rank, int64_t{0}); }

int64_t AttentionPlan::seq_len() const { return sum(lengths); }

int64_t AttentionPlan::kv_seq_len() const { return replicated_kv ? kv_rows : sum(kv_lengths); }

bool exchanges_lengths(const contract::AttentionSpec& spec) {
  return spec.cp_size > 1 && !spec.policy.require_seq_divisible &&
         (!spec.layout || (!spec.kv_layout && spec.kv_role != "replicated"));
}

AttentionPlan make_plan(const contract::AttentionSpec& spec, const std::vector<std::vector<int64_t>>& exchanged) {
  AttentionPlan plan;
  plan.cp_rank = spec.cp_rank;
  plan.cp_size = spec.cp_size;
  plan.joint_len = spec.joint_len;
  plan.joint_valid_lens = spec.joint_valid_lens;
  plan.joint_first = spec.joint_position == "prefix";
  plan.replicated_kv = spec.kv_role == "replicated";
  plan.rows = spec.q.sizes[1] - spec.joint_len;
  plan.kv_rows = spec.k.sizes[1] - spec.joint_len;
  plan.lengths = lengths_of(spec.layout, plan.rows, spec.cp_size, exchanged, 0);
  plan.kv_lengths = plan.replicated_kv ? std::vector<int64_t>(static_cast<size_t>(spec.cp_size), plan.kv_rows)
                                       : lengths_of(spec.kv_layout, plan.kv_rows, spec.cp_size, exchanged, 1);
  plan.num_heads = spec.q.sizes[2];
  plan.num_kv_heads = spec.k.sizes[2];
  plan.head_dim = spec.q.sizes[3];
  plan.v_head_dim = spec.v.sizes[3];
  plan.heads = partition::head_ranges(plan.num_heads, plan.num_kv_heads, spec.cp_size);
  if (spec.attn_mask) plan.mask = contract::mask_axes(spec);
  plan.is_causal = spec.is_causal;
  plan.softmax_scale = spec.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(spec.q.sizes[3])));
  plan.return_lse = spec.return_lse;
  return plan;
}

}  // namespace ulysses::strategy
