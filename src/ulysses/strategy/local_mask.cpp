#include "ulysses/strategy/local_mask.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "ulysses/exchange/gather_cache.h"
#include "ulysses/exchange/token_gather.h"

namespace ulysses::strategy {
namespace {

using contract::MaskAxis;
using exchange::Group;

// [B, S_kv] → [B, 1, 1, S_kv]
at::Tensor four_dimensions(const at::Tensor& mask) { return mask.dim() == 2 ? mask.unsqueeze(1).unsqueeze(1) : mask; }

at::Tensor gather_axis(const at::Tensor& mask, int64_t dim, const std::vector<int64_t>& lengths, const Group& group) {
  // Not every transport carries bool.
  const at::Tensor bytes = mask.scalar_type() == at::kBool ? mask.view(at::kByte) : mask;
  return exchange::gather_sequence(bytes, lengths, dim, group).view(mask.scalar_type());
}

// The axes that other ranks' part is needed of, with the lengths by which they are cut; an axis not gathered is empty.
struct GatheredAxes {
  std::vector<int64_t> q_lengths, kv_lengths;

  bool any() const { return !q_lengths.empty() || !kv_lengths.empty(); }
  exchange::GatherKey key() const {
    exchange::GatherKey key = {static_cast<int64_t>(q_lengths.size())};
    key.insert(key.end(), q_lengths.begin(), q_lengths.end());
    key.insert(key.end(), kv_lengths.begin(), kv_lengths.end());
    return key;
  }
};

GatheredAxes gathered_axes(const AttentionPlan& plan, const Strategy& strategy) {
  GatheredAxes axes;
  if (plan.cp_size == 1) return axes;
  if (plan.mask->q == MaskAxis::kLocal && strategy.attends_for_all()) axes.q_lengths = plan.lengths;
  if (plan.mask->kv == MaskAxis::kLocal) axes.kv_lengths = plan.kv_lengths;
  return axes;
}

at::Tensor gather(const at::Tensor& mask, const GatheredAxes& axes, const Group& group) {
  at::Tensor whole = four_dimensions(mask.detach());
  if (!axes.kv_lengths.empty()) whole = gather_axis(whole, 3, axes.kv_lengths, group);
  if (!axes.q_lengths.empty()) whole = gather_axis(whole, 2, axes.q_lengths, group);
  return whole;
}

// [B, T + S_kv] bool: false for joint keys behind their valid length.
at::Tensor valid_keys(const AttentionPlan& plan, int64_t num_kv_tokens, const at::Device& device) {
  const auto batch = static_cast<int64_t>(plan.joint_valid_lens.size());
  at::Tensor valid = at::ones({batch, num_kv_tokens}, at::TensorOptions(at::kBool));
  const int64_t begin = plan.joint_first ? 0 : num_kv_tokens - plan.joint_len;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t len = plan.joint_valid_lens[static_cast<size_t>(b)];
    valid[b].narrow(0, begin + len, plan.joint_len - len).zero_();
  }
  return valid.to(device);
}

at::Tensor hide_invalid_keys(const at::Tensor& mask, const at::Tensor& valid) {
  const at::Tensor keys = valid.unsqueeze(1).unsqueeze(1);
  if (!mask.defined()) return keys;
  if (mask.scalar_type() == at::kBool) return mask.logical_and(keys);
  return mask.masked_fill(keys.logical_not(), kNoKeys);
}

LocalMask part_of_mask(const at::Tensor& mask, const AttentionPlan& plan, const Strategy& strategy,
                       const LocalWork& work, const Group& group) {
  if (!mask.defined()) return {};
  const GatheredAxes axes = gathered_axes(plan, strategy);
  LocalMask local{four_dimensions(mask), 0};
  if (axes.any())
    local.mask = exchange::gather_once(mask, axes.key(), group, [&] { return gather(mask, axes, group); });
  if (plan.cp_size == 1 && plan.mask->kv == MaskAxis::kLocal) local.mask = local.mask.narrow(3, 0, plan.kv_length());
  if (plan.mask->q == MaskAxis::kLocal && axes.q_lengths.empty()) {
    local.mask = local.mask.narrow(2, 0, plan.length());
    local.q_begin = work.q_positions.back().begin;
  }
  if (local.mask.size(1) > 1 && !work.runs.empty())
    local.mask = local.mask.narrow(1, work.q_head_begin, work.runs.back().query.end);
  return local;
}

}  // namespace

LocalMask local_mask(const at::Tensor& mask, const AttentionPlan& plan, const Strategy& strategy, const LocalWork& work,
                     const at::Device& device, const Group& group) {
  LocalMask local = part_of_mask(mask, plan, strategy, work, group);
  if (!plan.joint_valid_lens.empty())
    local.mask = hide_invalid_keys(local.mask, valid_keys(plan, work.num_kv_tokens, device));
  return local;
}

kernels::KernelOutput hide_invalid_rows(const kernels::KernelOutput& local, const AttentionPlan& plan,
                                        const LocalWork& work) {
  if (plan.joint_valid_lens.empty()) return local;
  const auto batch = static_cast<int64_t>(plan.joint_valid_lens.size());
  at::Tensor invalid = at::zeros({batch, work.num_tokens()}, at::TensorOptions(at::kBool));
  const int64_t first = plan.joint_first ? 0 : plan.seq_len();  // position of the first joint token
  for (int64_t b = 0; b < batch; ++b) {
    const partition::Range hidden{first + plan.joint_valid_lens[static_cast<size_t>(b)], first + plan.joint_len};
    int64_t row = 0;
    for (const partition::Range& positions : work.q_positions) {
      const int64_t begin = std::max(positions.begin, hidden.begin), end = std::min(positions.end, hidden.end);
      if (begin < end) invalid[b].narrow(0, row + begin - positions.begin, end - begin).fill_(true);
      row += positions.size();
    }
  }
  invalid = invalid.to(local.out.device());
  kernels::KernelOutput result{local.out.masked_fill(invalid.unsqueeze(-1).unsqueeze(-1), 0.0), local.lse};
  if (local.lse.defined()) result.lse = local.lse.masked_fill(invalid.unsqueeze(1), kNoKeys);
  return result;
}

bool mask_is_gathered(const at::Tensor& mask, const AttentionPlan& plan, const Strategy& strategy, const Group& group) {
  const GatheredAxes axes = gathered_axes(plan, strategy);
  return axes.any() && exchange::is_gathered(mask, axes.key(), group);
}

at::Tensor grad_of_mask(const at::Tensor& mask, const at::Tensor& grad, const LocalMask& local, const LocalWork& work) {
  at::Tensor whole = at::zeros_like(mask, mask.options().requires_grad(false));
  if (!grad.defined() || work.runs.empty()) return whole;
  at::Tensor place = four_dimensions(whole);
  if (place.size(1) > 1) place = place.narrow(1, work.q_head_begin, grad.size(1));
  if (place.size(2) > 1) place = place.narrow(2, local.q_begin, grad.size(2));
  // Hidden joint keys differ from sequence to sequence, where the mask may be one for all of them.
  place.copy_(at::sum_to(grad, place.sizes()));
  return whole;
}

}  // namespace ulysses::strategy
