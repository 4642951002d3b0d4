#include "ulysses/processors/attend_runs.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/exchange/token_rows.h"
#include "ulysses/processors/kernel_processor.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::processors {
namespace {

using kernels::KernelOutput;
using partition::HeadRun;
using partition::Range;
using strategy::LocalWork;
using strategy::Qkv;

bool has_work(const LocalWork& work, const Qkv& views) {
  return !work.runs.empty() && work.num_tokens() > 0 && work.num_kv_tokens > 0 && views.q.size(0) > 0;
}

at::Tensor heads_of(const at::Tensor& tensor, const partition::Range& heads) {
  return tensor.narrow(2, heads.begin, heads.size());
}

// One call of attend(): heads with one group size, rows at contiguous positions.
struct Part {
  HeadRun heads;
  Range rows;  // of the rank's query rows
  Qkv qkv;
  AttendCall call;
};

at::Tensor part_of(const at::Tensor& x, int64_t dim, const Range& part) {
  return part.begin == 0 && part.end == x.size(dim) ? x : x.narrow(dim, part.begin, part.size());
}

// Heads and rows of the rank's mask; an axis of size 1 serves all.
at::Tensor mask_of(const strategy::LocalMask& local, const Range& heads, const Range& positions) {
  at::Tensor mask = local.mask;
  if (mask.size(1) > 1) mask = part_of(mask, 1, heads);
  if (mask.size(2) > 1) mask = part_of(mask, 2, {positions.begin - local.q_begin, positions.end - local.q_begin});
  return mask;
}

Part make_part(const AttendWork& work, const Qkv& views, const HeadRun& heads, const Range& rows,
               const Range& positions) {
  Part part{heads, rows, {}, work.call};
  part.qkv = {heads_of(part_of(views.q, 1, rows), heads.query), heads_of(views.k, heads.kv),
              heads_of(views.v, heads.kv)};
  part.call.q_positions = positions;
  part.call.q_head_start += heads.query.begin;
  if (work.mask.mask.defined()) part.call.attn_mask = mask_of(work.mask, heads.query, positions);
  if (work.call.sinks.defined()) part.call.sinks = part_of(work.call.sinks, 0, heads.query);
  return part;
}

// visit(part) for every range of rows and, within it, every run of heads; end_of_rows() behind each range.
void for_each_part(const AttendWork& work, const Qkv& views, const std::function<void(const Part&)>& visit,
                   const std::function<void()>& end_of_rows) {
  int64_t row = 0;
  for (const Range& positions : work.work.q_positions) {
    const Range rows{row, row + positions.size()};
    row = rows.end;
    if (rows.empty()) continue;
    for (const HeadRun& heads : work.work.runs) visit(make_part(work, views, heads, rows, positions));
    end_of_rows();
  }
}

at::Tensor joined(std::vector<at::Tensor>& parts, int64_t dim) {
  at::Tensor whole = parts.size() == 1 ? parts[0] : at::cat(parts, dim);
  parts.clear();
  return whole;
}

// Zeros [B, Sq, h, D_v] that autograd still sees as a function of q: none of its columns, padded to D_v.
KernelOutput nothing(const Qkv& views) {
  KernelOutput output;
  output.out = at::constant_pad_nd(views.q.narrow(3, 0, 0), {0, views.v.size(3)});
  output.lse =
      at::full({views.q.size(0), views.q.size(2), views.q.size(1)}, -std::numeric_limits<double>::infinity(),
               views.q.options().dtype(exchange::accumulate_dtype(views.q.scalar_type())).requires_grad(false));
  return output;
}

void check_result(const KernelOutput& result, const Qkv& qkv, const AttendCall& call) {
  const std::vector<int64_t> out = {qkv.q.size(0), qkv.q.size(1), qkv.q.size(2), qkv.v.size(3)};
  const std::vector<int64_t> lse = {qkv.q.size(0), qkv.q.size(2), qkv.q.size(1)};
  std::vector<base::Problem> problems;
  const auto expect = [&](std::string_view name, const at::Tensor& tensor, const std::vector<int64_t>& sizes,
                          bool same_dtype) {
    const std::string wanted = base::cat("[", base::join(sizes), "]");
    if (tensor.defined() && tensor.sizes().vec() == sizes &&
        (!same_dtype || tensor.scalar_type() == qkv.q.scalar_type()))
      return;
    const std::string got =
        tensor.defined() ? base::cat(dtype_name(tensor.scalar_type()), " ", tensor.sizes()) : std::string("nothing");
    problems.push_back(
        {"CP052", base::ErrorKind::kInvalidArgument,
         base::cat("attend() returned ", name, " ", got, " for q ", qkv.q.sizes(), " and v ", qkv.v.sizes()),
         "The sequence stays in dimension 1",
         base::cat("return ", name, " of shape ", wanted,
                   same_dtype ? base::cat(" in torch.", dtype_name(qkv.q.scalar_type())) : std::string())});
  };
  expect("out", result.out, out, /*same_dtype=*/true);
  if (call.need_lse) expect("lse", result.lse, lse, /*same_dtype=*/false);
  base::raise_if_any(std::move(problems), "attend");
}

}  // namespace

AttendWork attend_work(const contract::AttentionOptions& options, const strategy::AttentionPlan& plan, LocalWork work,
                       strategy::LocalMask mask, const at::Tensor& sinks, bool trains) {
  AttendCall call;
  call.is_causal = plan.is_causal;
  call.softmax_scale = options.softmax_scale;
  call.softcap = options.softcap;
  call.kv_positions = {0, work.num_kv_tokens};
  call.q_head_start = work.q_head_begin;
  if (sinks.defined() && !work.runs.empty())
    call.sinks = sinks.narrow(0, work.q_head_begin, work.runs.back().query.end);
  call.need_lse = plan.return_lse;
  call.trains = trains;
  call.kernel = options.kernel;
  return {std::move(work), std::move(call), std::move(mask)};
}

KernelOutput attend_runs(const AttendWork& work, const Qkv& views, const AttendFunction& attend) {
  if (!has_work(work.work, views)) return nothing(views);
  std::vector<at::Tensor> outs, lses, out_rows, lse_rows;
  const auto visit = [&](const Part& part) {
    KernelOutput result = attend(part.qkv.q, part.qkv.k, part.qkv.v, part.call);
    check_result(result, part.qkv, part.call);
    outs.push_back(std::move(result.out));
    // One dtype on every rank, whatever the backend computes in: ranks without work have no backend to ask.
    if (result.lse.defined()) lses.push_back(result.lse.to(exchange::accumulate_dtype(views.q.scalar_type())));
  };
  for_each_part(work, views, visit, [&] {
    out_rows.push_back(joined(outs, 2));
    if (!lses.empty()) lse_rows.push_back(joined(lses, 1));
  });
  return {joined(out_rows, 1), lse_rows.empty() ? at::Tensor() : joined(lse_rows, 2)};
}

namespace {

// Gradients of keys and values over several ranges of rows: a sum, in float32.
void add_to(at::Tensor& sum, const at::Tensor& part) {
  if (!sum.defined()) {
    sum = part;
    return;
  }
  sum = sum.to(exchange::accumulate_dtype(part.scalar_type())).add(part);
}

struct RowGrads {
  std::vector<at::Tensor> dq, dk, dv, dsinks;
};

}  // namespace

LocalGrads attend_runs_backward(const AttendWork& work, const Qkv& views, const KernelOutput& local,
                                const KernelOutput& grad, bool mask_needs_grad) {
  LocalGrads total;
  if (mask_needs_grad) total.dmask = at::zeros_like(work.mask.mask, work.mask.mask.options().requires_grad(false));
  if (!has_work(work.work, views)) {
    total.views = {at::zeros_like(views.q), at::zeros_like(views.k), at::zeros_like(views.v)};
    return total;
  }
  RowGrads heads;
  std::vector<at::Tensor> dq_rows;
  const auto cut = [](const at::Tensor& x, int64_t head_dim, int64_t row_dim, const Part& part) {
    return x.defined() ? part_of(part_of(x, row_dim, part.rows), head_dim, part.heads.query) : x;
  };
  const auto visit = [&](const Part& part) {
    kernels::KernelGrads grads =
        kernel_backward({cut(grad.out, 2, 1, part), cut(grad.lse, 1, 2, part)}, part.qkv,
                        {cut(local.out, 2, 1, part), cut(local.lse, 1, 2, part)}, part.call, mask_needs_grad);
    heads.dq.push_back(std::move(grads.dq));
    heads.dk.push_back(std::move(grads.dk));
    heads.dv.push_back(std::move(grads.dv));
    if (grads.dsinks.defined()) heads.dsinks.push_back(std::move(grads.dsinks));
    if (mask_needs_grad)
      mask_of({total.dmask, work.mask.q_begin}, part.heads.query, part.call.q_positions).add_(grads.dmask);
  };
  for_each_part(work, views, visit, [&] {
    dq_rows.push_back(joined(heads.dq, 2));
    add_to(total.views.k, joined(heads.dk, 2));
    add_to(total.views.v, joined(heads.dv, 2));
    if (!heads.dsinks.empty()) add_to(total.dsinks, joined(heads.dsinks, 0));
  });
  total.views.q = joined(dq_rows, 1);
  total.views.k = total.views.k.to(views.k.scalar_type());
  total.views.v = total.views.v.to(views.v.scalar_type());
  return total;
}

}  // namespace ulysses::processors
