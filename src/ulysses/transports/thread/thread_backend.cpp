#include "ulysses/transports/thread/thread_backend.h"

#include <c10/core/GradMode.h>

#include <cstring>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/transports/thread/thread_work.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::transports {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;

std::string find_tensor_problem(const at::Tensor& tensor) {
  if (!tensor.defined()) return "a tensor is undefined";
  if (!tensor.device().is_cpu()) return base::cat("a tensor is on ", tensor.device(), ", thread ranks use cpu");
  if (tensor.layout() != at::kStrided) return base::cat("a tensor has layout ", tensor.layout(), ", not strided");
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    return base::cat("a tensor of shape ", tensor.sizes(), " and strides ", tensor.strides(),
                     " is not contiguous; pass tensor.contiguous()");
  }
  return {};
}

// Every tensor of the call, for validation and to keep its memory.
void add_tensors(Contribution& own, const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    if (!own.problem.empty()) return;
    own.problem = find_tensor_problem(tensor);
    if (!own.problem.empty()) return;
    if (own.keep_alive.empty()) own.dtype = tensor.scalar_type();
    if (own.dtype != tensor.scalar_type()) {
      own.problem = base::cat("tensors of dtype ", c10::toString(own.dtype), " and ",
                              c10::toString(tensor.scalar_type()), " in one call");
    }
    own.keep_alive.push_back(tensor);
  }
}

bool expect_count(Contribution& own, const char* what, size_t count, size_t expected) {
  if (own.problem.empty() && count != expected) {
    own.problem = base::cat(count, ' ', what, ", expected ", expected);
  }
  return own.problem.empty();
}

Block<const std::byte> source_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}
Block<std::byte> target_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}
// Peers' blocks are combined by us, not copied: only the size is announced.
Block<std::byte> size_of(const at::Tensor& tensor) { return {nullptr, static_cast<int64_t>(tensor.nbytes())}; }

// Cuts `whole` along dim 0 of its tensor into one block per rank; no splits: equal ones.
template <typename Byte>
void cut(Contribution& own, std::vector<Block<Byte>>& blocks, const Block<Byte>& whole, int64_t rows,
         const std::vector<int64_t>& splits) {
  const auto size = static_cast<int64_t>(blocks.size());
  if (splits.empty() && rows % size != 0) {
    own.problem = base::cat(rows, " rows do not divide by ", size, " ranks");
    return;
  }
  if (!splits.empty() && !expect_count(own, "split sizes", splits.size(), blocks.size())) return;
  int64_t total = 0;
  for (const auto split : splits) {
    total += split;
    if (split < 0) own.problem = base::cat("split size ", split, " is negative");
  }
  if (!splits.empty() && total != rows) {
    own.problem =
        base::cat("split sizes [", base::join(splits), "] sum to ", total, ", the tensor has ", rows, " rows");
  }
  if (!own.problem.empty()) return;
  int64_t row = 0;
  const int64_t row_bytes = rows > 0 ? whole.bytes / rows : 0;
  for (int64_t peer = 0; peer < size; ++peer) {
    const auto index = static_cast<size_t>(peer);
    const int64_t count = splits.empty() ? rows / size : splits[index];
    if (count > 0) blocks[index] = {whole.data + row * row_bytes, count * row_bytes};
    row += count;
  }
}

int64_t rows_of(const at::Tensor& tensor) { return tensor.dim() > 0 ? tensor.size(0) : 1; }

// A peer would read what this rank has already overwritten.
void refuse_overlap(Contribution& own, const Tensors& outputs, const Tensors& inputs) {
  if (!own.problem.empty()) return;
  for (const auto& output : outputs) {
    const auto to = source_of(output);
    for (const auto& input : inputs) {
      const auto from = source_of(input);
      if (to.bytes == 0 || from.bytes == 0) continue;
      if (to.data >= from.data + from.bytes || from.data >= to.data + to.bytes) continue;
      own.problem = "an input and an output share memory; pass a separate output";
      return;
    }
  }
}

void check_reduction(Contribution& own, const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  own.reduce_op = op.op_;
  if (!own.problem.empty()) return;
  const bool known =
      op.op_ == Op::SUM || op.op_ == Op::AVG || op.op_ == Op::PRODUCT || op.op_ == Op::MIN || op.op_ == Op::MAX;
  const bool real = !c10::isComplexType(own.dtype);
  if (!known) {
    own.problem = base::cat("reduce op ", static_cast<int>(op.op_),
                            " is not one of SUM (0), AVG (1), PRODUCT (2), MIN (3), MAX (4)");
  } else if (op.op_ == Op::AVG && c10::isIntegralType(own.dtype, /*includeBool=*/true)) {
    own.problem = base::cat("AVG of ", c10::toString(own.dtype), "; use SUM");
  } else if ((op.op_ == Op::MIN || op.op_ == Op::MAX) && !real) {
    own.problem = base::cat("MIN or MAX of ", c10::toString(own.dtype), "; complex numbers have no order");
  }
}

// In rank order, so that every run and every rank gets the same bits.
at::Tensor combine_blocks(const ThreadHub& hub, int64_t rank, const at::Tensor& like, int64_t op) {
  const c10::AutoGradMode no_grad(false);
  const auto dtype = like.scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor sum;
  for (int64_t peer = 0; peer < hub.size(); ++peer) {
    const auto* data = hub.contribution(peer).send[static_cast<size_t>(rank)].data;
    const auto block = at::from_blob(const_cast<std::byte*>(data), like.sizes(), at::device(at::kCPU).dtype(dtype));
    if (peer == 0) {
      sum = block.to(narrow ? at::kFloat : dtype, /*non_blocking=*/false, /*copy=*/true);
    } else if (op == c10d::ReduceOp::PRODUCT) {
      sum.mul_(block);
    } else if (op == c10d::ReduceOp::MIN) {
      at::minimum_out(sum, sum, block.to(sum.scalar_type()));
    } else if (op == c10d::ReduceOp::MAX) {
      at::maximum_out(sum, sum, block.to(sum.scalar_type()));
    } else {
      sum.add_(block);
    }
  }
  if (op == c10d::ReduceOp::AVG) sum.div_(hub.size());
  return sum.to(dtype);
}

}  // namespace

ThreadBackend::ThreadBackend(std::shared_ptr<ThreadHub> hub, int64_t rank)
    : Backend(static_cast<int>(rank), static_cast<int>(hub->size())), hub_(std::move(hub)), timeout_(hub_->timeout()) {}

const std::string ThreadBackend::getBackendName() const { return std::string(kThreadBackendName); }

void ThreadBackend::abort() { hub_->abort(rank_, "its group was aborted"); }

std::chrono::milliseconds ThreadBackend::choose_timeout(std::chrono::milliseconds of_call) const {
  return of_call.count() > 0 ? of_call : timeout_;
}

ThreadBackend::WorkPtr ThreadBackend::move_blocks(OpType type, std::chrono::milliseconds timeout, Tensors results) {
  hub_->exchange(rank_, choose_timeout(timeout));
  return c10::make_intrusive<DoneWork>(rank_, type, std::move(results));
}

ThreadBackend::WorkPtr ThreadBackend::reduce_blocks(OpType type, std::chrono::milliseconds timeout,
                                                    const at::Tensor& result) {
  at::Tensor reduced;
  hub_->exchange(rank_, choose_timeout(timeout), [&] {
    const int64_t op = hub_->contribution(rank_).reduce_op;
    if (result.numel() > 0) reduced = combine_blocks(*hub_, rank_, result, op);
  });
  // Only now may the result be written: it can be a part of what the peers have just read.
  if (reduced.defined()) std::memcpy(result.mutable_data_ptr(), reduced.const_data_ptr(), result.nbytes());
  return c10::make_intrusive<DoneWork>(rank_, type, Tensors{result});
}

ThreadBackend::WorkPtr ThreadBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                                    Splits& input_splits, const c10d::AllToAllOptions& options) {
  Contribution& own = hub_->begin(rank_, "all_to_all");
  add_tensors(own, {input, output});
  refuse_overlap(own, {output}, {input});
  if (own.problem.empty()) cut(own, own.send, source_of(input), rows_of(input), input_splits);
  if (own.problem.empty()) cut(own, own.receive, target_of(output), rows_of(output), output_splits);
  return move_blocks(OpType::ALLTOALL_BASE, options.timeout, {output});
}

ThreadBackend::WorkPtr ThreadBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllToAllOptions& options) {
  Contribution& own = hub_->begin(rank_, "all_to_all");
  add_tensors(own, inputs);
  add_tensors(own, outputs);
  refuse_overlap(own, outputs, inputs);
  if (expect_count(own, "inputs", inputs.size(), own.send.size()) &&
      expect_count(own, "outputs", outputs.size(), own.send.size())) {
    for (size_t peer = 0; peer < inputs.size(); ++peer) {
      own.send[peer] = source_of(inputs[peer]);
      own.receive[peer] = target_of(outputs[peer]);
    }
  }
  return move_blocks(OpType::ALLTOALL, options.timeout, outputs);
}

ThreadBackend::WorkPtr ThreadBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& options) {
  Contribution& own = hub_->begin(rank_, "all_gather");
  add_tensors(own, {input, output});
  if (own.problem.empty()) {
    own.send.assign(own.send.size(), source_of(input));
    // In elements, not rows: torch allows any shape of the output.
    cut(own, own.receive, target_of(output), output.numel(), {});
  }
  return move_blocks(OpType::_ALLGATHER_BASE, options.timeout, {output});
}

ThreadBackend::WorkPtr ThreadBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& options) {
  Contribution& own = hub_->begin(rank_, "all_gather");
  add_tensors(own, inputs);
  if (expect_count(own, "inputs", inputs.size(), 1) && expect_count(own, "output lists", outputs.size(), 1) &&
      expect_count(own, "outputs", outputs[0].size(), own.receive.size())) {
    add_tensors(own, outputs[0]);
  }
  if (own.problem.empty()) {
    own.send.assign(own.send.size(), source_of(inputs[0]));
    for (size_t peer = 0; peer < own.receive.size(); ++peer) own.receive[peer] = target_of(outputs[0][peer]);
  }
  return move_blocks(OpType::ALLGATHER, options.timeout, outputs.empty() ? Tensors{} : outputs[0]);
}

ThreadBackend::WorkPtr ThreadBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::ReduceScatterOptions& options) {
  Contribution& own = hub_->begin(rank_, "reduce_scatter");
  add_tensors(own, {input, output});
  check_reduction(own, options.reduceOp);
  if (own.problem.empty()) {
    cut(own, own.send, source_of(input), input.numel(), {});
    own.receive.assign(own.receive.size(), size_of(output));
  }
  return reduce_blocks(OpType::_REDUCE_SCATTER_BASE, options.timeout, output);
}

ThreadBackend::WorkPtr ThreadBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  Contribution& own = hub_->begin(rank_, "reduce_scatter");
  add_tensors(own, outputs);
  if (expect_count(own, "outputs", outputs.size(), 1) && expect_count(own, "input lists", inputs.size(), 1) &&
      expect_count(own, "inputs", inputs[0].size(), own.send.size())) {
    add_tensors(own, inputs[0]);
  }
  check_reduction(own, options.reduceOp);
  if (own.problem.empty()) {
    for (size_t peer = 0; peer < own.send.size(); ++peer) own.send[peer] = source_of(inputs[0][peer]);
    own.receive.assign(own.receive.size(), size_of(outputs[0]));
  }
  return reduce_blocks(OpType::REDUCE_SCATTER, options.timeout, outputs.empty() ? at::Tensor() : outputs[0]);
}

ThreadBackend::WorkPtr ThreadBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Contribution& own = hub_->begin(rank_, "all_reduce");
  add_tensors(own, tensors);
  expect_count(own, "tensors", tensors.size(), 1);
  check_reduction(own, options.reduceOp);
  if (own.problem.empty()) {
    own.send.assign(own.send.size(), source_of(tensors[0]));
    own.receive.assign(own.receive.size(), size_of(tensors[0]));
  }
  return reduce_blocks(OpType::ALLREDUCE, options.timeout, tensors.empty() ? at::Tensor() : tensors[0]);
}

ThreadBackend::WorkPtr ThreadBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Contribution& own = hub_->begin(rank_, "broadcast");
  own.root = options.rootRank;
  add_tensors(own, tensors);
  if (own.root < 0 || own.root >= size_) own.problem = base::cat("root ", own.root, " of ", size_, " ranks");
  if (expect_count(own, "tensors", tensors.size(), 1)) {
    const auto root = static_cast<size_t>(own.root);
    if (own.root == rank_) own.send.assign(own.send.size(), source_of(tensors[0]));
    own.receive[root] = target_of(tensors[0]);
  }
  return move_blocks(OpType::BROADCAST, options.timeout, tensors);
}

ThreadBackend::WorkPtr ThreadBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& options) {
  Contribution& own = hub_->begin(rank_, "gather");
  own.root = options.rootRank;
  const bool is_root = own.root == rank_;
  add_tensors(own, inputs);
  if (own.root < 0 || own.root >= size_) own.problem = base::cat("root ", own.root, " of ", size_, " ranks");
  expect_count(own, "inputs", inputs.size(), 1);
  if (expect_count(own, "output lists", outputs.size(), is_root ? 1 : 0) && is_root &&
      expect_count(own, "outputs", outputs[0].size(), own.receive.size())) {
    add_tensors(own, outputs[0]);
  }
  if (own.problem.empty()) {
    own.send[static_cast<size_t>(own.root)] = source_of(inputs[0]);
    for (size_t peer = 0; is_root && peer < own.receive.size(); ++peer) own.receive[peer] = target_of(outputs[0][peer]);
  }
  return move_blocks(OpType::GATHER, options.timeout, outputs.empty() ? Tensors{} : outputs[0]);
}

ThreadBackend::WorkPtr ThreadBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ScatterOptions& options) {
  Contribution& own = hub_->begin(rank_, "scatter");
  own.root = options.rootRank;
  const bool is_root = own.root == rank_;
  add_tensors(own, outputs);
  if (own.root < 0 || own.root >= size_) own.problem = base::cat("root ", own.root, " of ", size_, " ranks");
  expect_count(own, "outputs", outputs.size(), 1);
  if (expect_count(own, "input lists", inputs.size(), is_root ? 1 : 0) && is_root &&
      expect_count(own, "inputs", inputs[0].size(), own.send.size())) {
    add_tensors(own, inputs[0]);
  }
  if (own.problem.empty()) {
    for (size_t peer = 0; is_root && peer < own.send.size(); ++peer) own.send[peer] = source_of(inputs[0][peer]);
    own.receive[static_cast<size_t>(own.root)] = target_of(outputs[0]);
  }
  return move_blocks(OpType::SCATTER, options.timeout, outputs);
}

ThreadBackend::WorkPtr ThreadBackend::barrier(const c10d::BarrierOptions& options) {
  hub_->begin(rank_, "barrier");
  return move_blocks(OpType::BARRIER, options.timeout, {});
}

void ThreadBackend::check_peer(int peer, const char* op) const {
  if (peer >= 0 && peer < size_) return;
  raise_usable(base::cat(op, " names rank ", peer), base::cat("name a rank from 0 to ", size_ - 1), op, rank_, size_);
}

ThreadBackend::WorkPtr ThreadBackend::send(Tensors& tensors, int destination, int tag) {
  check_peer(destination, "send");
  const std::string problem = tensors.size() == 1 ? find_tensor_problem(tensors[0]) : "expected one tensor";
  if (!problem.empty()) raise_usable(problem, "send one contiguous CPU tensor", "send", rank_, size_);
  hub_->post({rank_, destination, tag}, tensors[0].detach().clone());
  return c10::make_intrusive<DoneWork>(rank_, OpType::SEND, Tensors{});
}

ThreadBackend::WorkPtr ThreadBackend::recv(Tensors& tensors, int source, int tag) {
  check_peer(source, "recv");
  const std::string problem = tensors.size() == 1 ? find_tensor_problem(tensors[0]) : "expected one tensor";
  if (!problem.empty()) raise_usable(problem, "receive into one contiguous CPU tensor", "recv", rank_, size_);
  return c10::make_intrusive<RecvWork>(hub_, ThreadHub::Address{source, rank_, tag}, tensors[0], timeout_);
}

}  // namespace ulysses::transports
