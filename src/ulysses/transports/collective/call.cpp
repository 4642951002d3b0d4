#include "ulysses/transports/collective/call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "ulysses/base/text.h"
#include "ulysses/transports/collective/combine.h"

namespace ulysses::transports {
namespace {

Block<const std::byte> source_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}
Block<std::byte> target_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

bool overlap(const Block<const std::byte>& a, const Block<const std::byte>& b) {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

std::string find_split_problem(int64_t rows, size_t ranks, const Call::Splits& splits) {
  if (splits.empty()) {
    if (rows % static_cast<int64_t>(ranks) == 0) return {};
    return base::cat(rows, " rows do not divide by ", ranks, " ranks");
  }
  if (splits.size() != ranks) return base::cat(splits.size(), " split sizes, expected ", ranks);
  int64_t total = 0;
  for (const auto split : splits) {
    if (split < 0) return base::cat("split size ", split, " is negative");
    total += split;
  }
  if (total == rows) return {};
  return base::cat("split sizes [", base::join(splits), "] sum to ", total, ", the tensor has ", rows, " rows");
}

template <typename Byte>
void cut(std::vector<Block<Byte>>& blocks, const Block<Byte>& whole, int64_t rows, const Call::Splits& splits) {
  const auto even = rows / static_cast<int64_t>(blocks.size());
  const int64_t row_bytes = rows > 0 ? whole.bytes / rows : 0;
  int64_t row = 0;
  for (size_t peer = 0; peer < blocks.size(); ++peer) {
    const int64_t count = splits.empty() ? even : splits[peer];
    if (count > 0) blocks[peer] = {whole.data + row * row_bytes, count * row_bytes};
    row += count;
  }
}

}  // namespace

std::string find_tensor_problem(const at::Tensor& tensor) {
  if (!tensor.defined()) return "a tensor is undefined";
  if (!tensor.device().is_cpu()) return base::cat("a tensor is on ", tensor.device(), ", these ranks use cpu");
  if (tensor.layout() != at::kStrided) return base::cat("a tensor has layout ", tensor.layout(), ", not strided");
  return {};
}

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

at::Tensor plain_copy_if_needed(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  to.copy_(from.view(to.sizes()));
}

bool Call::accept(const at::Tensor& tensor) {
  if (!ok()) return false;
  own.problem = find_tensor_problem(tensor);
  if (!ok()) return false;
  if (own.keep_alive.empty()) own.dtype = tensor.scalar_type();
  if (own.dtype != tensor.scalar_type()) {
    own.problem = base::cat("tensors of dtype ", c10::toString(own.dtype), " and ", c10::toString(tensor.scalar_type()),
                            " in one call");
  }
  return ok();
}

at::Tensor Call::input(const at::Tensor& tensor) {
  if (!accept(tensor)) return {};
  return own.keep_alive.emplace_back(plain_copy_if_needed(tensor));
}

at::Tensor Call::stage(const at::Tensor& tensor, bool with_values) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    own.problem = base::cat("an output of shape ", tensor.sizes(), " and strides ", tensor.strides(),
                            " has several elements in one place; pass tensor.clone()");
    return {};
  }
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  at::Tensor memory = at::empty(tensor.sizes(), at::device(at::kCPU).dtype(tensor.scalar_type()));
  if (with_values) memory.copy_(tensor);
  staged_.emplace_back(tensor, memory);
  return own.keep_alive.emplace_back(memory);
}

at::Tensor Call::output(const at::Tensor& tensor) {
  if (!accept(tensor)) return {};
  return is_plain(tensor) ? own.keep_alive.emplace_back(tensor) : stage(tensor, /*with_values=*/false);
}

at::Tensor Call::update(const at::Tensor& tensor) {
  if (!accept(tensor)) return {};
  return is_plain(tensor) ? own.keep_alive.emplace_back(tensor) : stage(tensor, /*with_values=*/true);
}

at::Tensor Call::output_beside(const at::Tensor& tensor, const Tensors& inputs) {
  if (!accept(tensor)) return {};
  bool inside = !is_plain(tensor);
  for (const auto& input : inputs) inside = inside || (input.defined() && overlap(source_of(tensor), source_of(input)));
  return inside ? stage(tensor, /*with_values=*/false) : own.keep_alive.emplace_back(tensor);
}

bool Call::expect_count(const char* what, size_t count, size_t expected) {
  if (ok() && count != expected) own.problem = base::cat(count, ' ', what, ", expected ", expected);
  return ok();
}

void Call::name_root(int64_t root) {
  own.root = root;
  const auto size = own.send.size();
  if (root < 0 || root >= static_cast<int64_t>(size)) own.problem = base::cat("root ", root, " of ", size, " ranks");
}

void Call::reduce_with(int64_t op) {
  own.reduce_op = op;
  if (ok()) own.problem = find_reduction_problem(own.dtype, op);
}

void Call::send(int64_t peer, const at::Tensor& tensor) {
  if (ok()) own.send[static_cast<size_t>(peer)] = source_of(tensor);
}

void Call::send_to_all(const at::Tensor& tensor) {
  if (!ok()) return;
  own.same_for_all = true;
  own.send.assign(own.send.size(), source_of(tensor));
}

void Call::receive(int64_t peer, const at::Tensor& tensor) {
  if (ok()) own.receive[static_cast<size_t>(peer)] = target_of(tensor);
}

void Call::expect_size(int64_t peer, const at::Tensor& tensor) {
  if (ok()) own.receive[static_cast<size_t>(peer)] = {nullptr, static_cast<int64_t>(tensor.nbytes())};
}

void Call::send_cut(const at::Tensor& tensor, int64_t rows, const Splits& splits) {
  if (ok()) own.problem = find_split_problem(rows, own.send.size(), splits);
  if (ok()) cut(own.send, source_of(tensor), rows, splits);
}

void Call::receive_cut(const at::Tensor& tensor, int64_t rows, const Splits& splits) {
  if (ok()) own.problem = find_split_problem(rows, own.receive.size(), splits);
  if (ok()) cut(own.receive, target_of(tensor), rows, splits);
}

void Call::refuse_overlap() {
  if (!ok()) return;
  for (size_t source = 0; source < own.receive.size(); ++source) {
    const auto& to = own.receive[source];
    if (to.data == nullptr) continue;
    for (const auto& from : own.send) {
      const bool stays = static_cast<int64_t>(source) == rank_ && to.data == from.data && to.bytes == from.bytes;
      if (stays || !overlap({to.data, to.bytes}, from)) continue;
      own.problem = "an input and an output share memory; pass a separate output";
      return;
    }
  }
}

void Call::deliver() const {
  for (const auto& [tensor, memory] : staged_) copy_values(tensor, memory);
}

}  // namespace ulysses::transports
