#pragma once

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "ulysses/base/error.h"

// The calls that torch 2.13 renamed, and short forms for tests.
namespace ulysses::testing {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;
using Splits = std::vector<int64_t>;

template <typename PG>
auto all_to_all(PG& group, at::Tensor recv, at::Tensor send, Splits recv_splits = {}, Splits send_splits = {}) {
  if constexpr (requires { group.all_to_all_single(recv, send, recv_splits, send_splits); }) {
    return group.all_to_all_single(recv, send, recv_splits, send_splits);
  } else {
    return group.alltoall_base(recv, send, recv_splits, send_splits);
  }
}

template <typename PG>
auto all_gather(PG& group, at::Tensor recv, at::Tensor send) {
  if constexpr (requires { group.all_gather_single(recv, send); }) {
    return group.all_gather_single(recv, send);
  } else {
    return group._allgather_base(recv, send);
  }
}

template <typename PG>
auto reduce_scatter(PG& group, at::Tensor recv, at::Tensor send, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  if constexpr (requires { group.reduce_scatter_single(recv, send, options); }) {
    return group.reduce_scatter_single(recv, send, options);
  } else {
    return group._reduce_scatter_base(recv, send, options);
  }
}

inline at::Tensor all_reduce(c10d::ProcessGroup& group, at::Tensor tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  Tensors tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  group.allreduce(tensors, options)->wait();
  return tensors[0];
}

inline auto send(c10d::ProcessGroup& group, at::Tensor tensor, int64_t destination, int tag = 0) {
  Tensors tensors{std::move(tensor)};
  return group.send(tensors, static_cast<int>(destination), tag);
}

inline auto recv(c10d::ProcessGroup& group, at::Tensor tensor, int64_t source, int tag = 0) {
  Tensors tensors{std::move(tensor)};
  return group.recv(tensors, static_cast<int>(source), tag);
}

// A group that notes where the buffer of each all-to-all lies; the data moves on through `inner`.
inline GroupPtr note_sent_buffers(const GroupPtr& inner, std::vector<const void*>& sent) {
  struct Backend final : c10d::Backend {
    Backend(c10::intrusive_ptr<c10d::Backend> backend, std::vector<const void*>& pointers)
        : c10d::Backend(backend->getRank(), backend->getSize()), inner(std::move(backend)), sent(pointers) {}
    const std::string getBackendName() const override { return inner->getBackendName(); }
    c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                                 Splits& input_splits, const c10d::AllToAllOptions& options) override {
      sent.push_back(input.const_data_ptr());
      return inner->alltoall_base(output, input, output_splits, input_splits, options);
    }
    c10::intrusive_ptr<c10d::Backend> inner;
    std::vector<const void*>& sent;
  };
  auto group = c10::make_intrusive<c10d::ProcessGroup>(inner->getRank(), inner->getSize());
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<Backend>(inner->getBackend(c10::DeviceType::CPU), sent);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return group;
}

// The text of the base::Error with this id that `call` throws; empty if it throws none.
template <typename Call>
std::string error_of(Call call, const std::string& id = "CP062") {
  try {
    call();
  } catch (const base::Error& error) {
    return error.id() == id ? error.what() : "another id: " + error.id();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace ulysses::testing
