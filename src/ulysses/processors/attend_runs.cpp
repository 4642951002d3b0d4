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
using strategy::LocalWork;
using strategy::Qkv;

bool has_work(const LocalWork& work, const Qkv& views) {
  return !work.runs.empty() && work.num_tokens > 0 && work.num_kv_tokens > 0 && views.q.size(0) > 0;
}

at::Tensor heads_of(const at::Tensor& tensor, const partition::Range& heads) {
  return tensor.narrow(2, heads.begin, heads.size());
}

Qkv slice(const Qkv& views, const HeadRun& run) {
  return {heads_of(views.q, run.query), heads_of(views.k, run.kv), heads_of(views.v, run.kv)};
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

AttendCall attend_call(const contract::AttentionOptions& options, const strategy::AttentionPlan& plan,
                       const LocalWork& work, bool trains) {
  AttendCall call;
  call.is_causal = plan.is_causal;
  call.softmax_scale = options.softmax_scale;
  call.q_positions = {work.q_begin, work.q_begin + work.num_tokens};
  call.kv_positions = {0, work.num_kv_tokens};
  call.q_head_start = work.q_head_begin;
  call.need_lse = plan.return_lse;
  call.trains = trains;
  call.kernel = options.kernel;
  return call;
}

KernelOutput attend_runs(const LocalWork& work, const Qkv& views, const AttendCall& call,
                         const AttendFunction& attend) {
  if (!has_work(work, views)) return nothing(views);
  std::vector<at::Tensor> outs;
  std::vector<at::Tensor> lses;
  for (const HeadRun& run : work.runs) {
    AttendCall run_call = call;
    run_call.q_head_start += run.query.begin;
    const Qkv qkv = slice(views, run);
    KernelOutput result = attend(qkv.q, qkv.k, qkv.v, run_call);
    check_result(result, qkv, call);
    outs.push_back(std::move(result.out));
    // One dtype on every rank, whatever the backend computes in: ranks without work have no backend to ask.
    if (result.lse.defined()) lses.push_back(result.lse.to(exchange::accumulate_dtype(views.q.scalar_type())));
  }
  if (outs.size() == 1) return {outs[0], lses.empty() ? at::Tensor() : lses[0]};
  return {at::cat(outs, 2), lses.empty() ? at::Tensor() : at::cat(lses, 1)};
}

Qkv attend_runs_backward(const LocalWork& work, const Qkv& views, const KernelOutput& local, const at::Tensor& grad_out,
                         const AttendCall& call) {
  if (!has_work(work, views)) return {at::zeros_like(views.q), at::zeros_like(views.k), at::zeros_like(views.v)};
  std::vector<at::Tensor> dq, dk, dv;
  for (const HeadRun& run : work.runs) {
    const Qkv qkv = slice(views, run);
    const KernelOutput output{heads_of(local.out, run.query), local.lse.narrow(1, run.query.begin, run.query.size())};
    kernels::KernelGrads grads = kernel_backward(heads_of(grad_out, run.query), qkv, output, call);
    dq.push_back(std::move(grads.dq));
    dk.push_back(std::move(grads.dk));
    dv.push_back(std::move(grads.dv));
  }
  if (dq.size() == 1) return {dq[0], dk[0], dv[0]};
  return {at::cat(dq, 2), at::cat(dk, 2), at::cat(dv, 2)};
}

}  // namespace ulysses::processors
