#include "ulysses/transports/collective/collective_backend.h"

#include <utility>

#include "ulysses/base/text.h"

namespace ulysses::transports {

using c10d::OpType;

namespace {

int64_t rows_of(const at::Tensor& tensor) { return tensor.defined() && tensor.dim() > 0 ? tensor.size(0) : 1; }
// torch allows any shape of a whole that is cut evenly.
int64_t elements_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.numel() : 0; }

using Tensors = CollectiveBackend::Tensors;
const Tensors& first(const std::vector<Tensors>& lists) {
  static const Tensors none;
  return lists.empty() ? none : lists.front();
}

}  // namespace

CollectiveBackend::WorkPtr CollectiveBackend::run(Call& call, OpType type, std::chrono::milliseconds timeout,
                                                  Tensors results, const at::Tensor& reduced) {
  ++calls_;
  call.refuse_overlap();
  exchange(std::move(call.own), timeout.count() > 0 ? timeout : timeout_, reduced);
  call.deliver();
  return c10::make_intrusive<DoneWork>(rank_, type, std::move(results));
}

CollectiveBackend::WorkPtr CollectiveBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                            Splits& output_splits, Splits& input_splits,
                                                            const c10d::AllToAllOptions& options) {
  Call call("all_to_all", rank_, size_);
  const auto from = call.input(input), to = call.output(output);
  call.send_cut(from, rows_of(from), input_splits);
  call.receive_cut(to, rows_of(to), output_splits);
  return run(call, OpType::ALLTOALL_BASE, options.timeout, {output});
}

CollectiveBackend::WorkPtr CollectiveBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllToAllOptions& options) {
  Call call("all_to_all", rank_, size_);
  const auto size = static_cast<size_t>(size_);
  if (call.expect_count("inputs", inputs.size(), size) && call.expect_count("outputs", outputs.size(), size)) {
    for (int64_t peer = 0; peer < size_; ++peer) {
      call.send(peer, call.input(inputs[static_cast<size_t>(peer)]));
      call.receive(peer, call.output(outputs[static_cast<size_t>(peer)]));
    }
  }
  return run(call, OpType::ALLTOALL, options.timeout, outputs);
}

CollectiveBackend::WorkPtr CollectiveBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                              const c10d::AllgatherOptions& options) {
  Call call("all_gather", rank_, size_);
  const auto from = call.input(input), to = call.output(output);
  call.send_to_all(from);
  call.receive_cut(to, elements_of(to), {});
  return run(call, OpType::_ALLGATHER_BASE, options.timeout, {output});
}

CollectiveBackend::WorkPtr CollectiveBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  Call call("all_gather", rank_, size_);
  if (call.expect_count("inputs", inputs.size(), 1) && call.expect_count("output lists", outputs.size(), 1) &&
      call.expect_count("outputs", outputs[0].size(), static_cast<size_t>(size_))) {
    call.send_to_all(call.input(inputs[0]));
    for (int64_t peer = 0; peer < size_; ++peer) {
      call.receive(peer, call.output(outputs[0][static_cast<size_t>(peer)]));
    }
  }
  return run(call, OpType::ALLGATHER, options.timeout, first(outputs));
}

CollectiveBackend::WorkPtr CollectiveBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                   const c10d::ReduceScatterOptions& options) {
  Call call("reduce_scatter", rank_, size_);
  const auto from = call.input(input), to = call.output_beside(output, {from});
  call.reduce_with(options.reduceOp.op_);
  call.send_cut(from, elements_of(from), {});
  for (int64_t peer = 0; peer < size_; ++peer) call.expect_size(peer, to);
  return run(call, OpType::_REDUCE_SCATTER_BASE, options.timeout, {output}, to);
}

CollectiveBackend::WorkPtr CollectiveBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                             const c10d::ReduceScatterOptions& options) {
  Call call("reduce_scatter", rank_, size_);
  at::Tensor to;
  if (call.expect_count("outputs", outputs.size(), 1) && call.expect_count("input lists", inputs.size(), 1) &&
      call.expect_count("inputs", inputs[0].size(), static_cast<size_t>(size_))) {
    Tensors from;
    for (const auto& input : inputs[0]) from.push_back(call.input(input));
    to = call.output_beside(outputs[0], from);
    for (int64_t peer = 0; peer < size_; ++peer) {
      call.send(peer, from[static_cast<size_t>(peer)]);
      call.expect_size(peer, to);
    }
  }
  call.reduce_with(options.reduceOp.op_);
  return run(call, OpType::REDUCE_SCATTER, options.timeout, outputs, to);
}

CollectiveBackend::WorkPtr CollectiveBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Call call("all_reduce", rank_, size_);
  at::Tensor both;
  if (call.expect_count("tensors", tensors.size(), 1)) both = call.update(tensors[0]);
  call.reduce_with(options.reduceOp.op_);
  call.send_to_all(both);
  for (int64_t peer = 0; peer < size_; ++peer) call.expect_size(peer, both);
  return run(call, OpType::ALLREDUCE, options.timeout, tensors, both);
}

CollectiveBackend::WorkPtr CollectiveBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Call call("reduce", rank_, size_);
  call.name_root(options.rootRank);
  const bool is_root = options.rootRank == rank_;
  at::Tensor both;
  if (call.expect_count("tensors", tensors.size(), 1)) {
    both = is_root ? call.update(tensors[0]) : call.input(tensors[0]);
  }
  call.reduce_with(options.reduceOp.op_);
  call.send(options.rootRank, both);
  for (int64_t peer = 0; is_root && peer < size_; ++peer) call.expect_size(peer, both);
  return run(call, OpType::REDUCE, options.timeout, tensors, is_root ? both : at::Tensor());
}

CollectiveBackend::WorkPtr CollectiveBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Call call("broadcast", rank_, size_);
  call.name_root(options.rootRank);
  if (call.expect_count("tensors", tensors.size(), 1)) {
    const auto both = call.update(tensors[0]);
    if (options.rootRank == rank_) call.send_to_all(both);
    call.receive(options.rootRank, both);
  }
  return run(call, OpType::BROADCAST, options.timeout, tensors);
}

CollectiveBackend::WorkPtr CollectiveBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                     const c10d::GatherOptions& options) {
  Call call("gather", rank_, size_);
  call.name_root(options.rootRank);
  const bool is_root = options.rootRank == rank_;
  if (call.expect_count("inputs", inputs.size(), 1) &&
      call.expect_count("output lists", outputs.size(), is_root ? 1 : 0)) {
    call.send(options.rootRank, call.input(inputs[0]));
    if (is_root && call.expect_count("outputs", outputs[0].size(), static_cast<size_t>(size_))) {
      for (int64_t peer = 0; peer < size_; ++peer) {
        call.receive(peer, call.output(outputs[0][static_cast<size_t>(peer)]));
      }
    }
  }
  return run(call, OpType::GATHER, options.timeout, first(outputs));
}

CollectiveBackend::WorkPtr CollectiveBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                      const c10d::ScatterOptions& options) {
  Call call("scatter", rank_, size_);
  call.name_root(options.rootRank);
  const bool is_root = options.rootRank == rank_;
  if (call.expect_count("outputs", outputs.size(), 1) &&
      call.expect_count("input lists", inputs.size(), is_root ? 1 : 0)) {
    call.receive(options.rootRank, call.output(outputs[0]));
    if (is_root && call.expect_count("inputs", inputs[0].size(), static_cast<size_t>(size_))) {
      for (int64_t peer = 0; peer < size_; ++peer) call.send(peer, call.input(inputs[0][static_cast<size_t>(peer)]));
    }
  }
  return run(call, OpType::SCATTER, options.timeout, outputs);
}

// A rank that refuses alone would leave the others waiting in the first of its collectives.
void CollectiveBackend::check_pairs(const Tensors& outputs, const Tensors& inputs, const char* op,
                                    std::chrono::milliseconds timeout) {
  Call call(op, rank_, size_);
  if (!call.expect_count("outputs", outputs.size(), inputs.size())) run(call, OpType::UNKNOWN, timeout, {});
}

CollectiveBackend::WorkPtr CollectiveBackend::allreduce_coalesced(Tensors& tensors,
                                                                  const c10d::AllreduceCoalescedOptions& options) {
  for (const auto& tensor : tensors) {
    Tensors one{tensor};
    allreduce(one, options);
  }
  return c10::make_intrusive<DoneWork>(rank_, OpType::ALLREDUCE_COALESCED, tensors);
}

CollectiveBackend::WorkPtr CollectiveBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                              const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs, "all_gather", options.timeout);
  for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
  return c10::make_intrusive<DoneWork>(rank_, OpType::ALLGATHER_COALESCED, outputs);
}

CollectiveBackend::WorkPtr CollectiveBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs, "reduce_scatter", options.timeout);
  for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
  return c10::make_intrusive<DoneWork>(rank_, OpType::COALESCED, outputs);
}

CollectiveBackend::WorkPtr CollectiveBackend::barrier(const c10d::BarrierOptions& options) {
  Call call("barrier", rank_, size_);
  return run(call, OpType::BARRIER, options.timeout, {});
}

void CollectiveBackend::check_message(const Tensors& tensors, int peer, const char* op) const {
  if (peer < 0 || peer >= size_) {
    raise_usable(base::cat(op, " names rank ", peer), base::cat("name a rank from 0 to ", size_ - 1), op, rank_, size_);
  }
  const std::string problem = tensors.size() == 1 ? find_tensor_problem(tensors[0]) : "expected one tensor";
  if (!problem.empty()) raise_usable(problem, base::cat(op, " one strided CPU tensor"), op, rank_, size_);
}

CollectiveBackend::WorkPtr CollectiveBackend::send(Tensors& tensors, int destination, int tag) {
  check_message(tensors, destination, "send");
  mail()->post({rank_, destination, tag}, plain_copy_if_needed(tensors[0]));
  return c10::make_intrusive<DoneWork>(rank_, OpType::SEND, Tensors{});
}

CollectiveBackend::WorkPtr CollectiveBackend::recv(Tensors& tensors, int source, int tag) {
  check_message(tensors, source, "recv");
  return c10::make_intrusive<RecvWork>(mail(), Mail::Address{source, rank_, tag}, size_, tensors[0], timeout_);
}

}  // namespace ulysses::transports
