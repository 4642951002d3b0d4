#include "ulysses/transports/recording/recording_group.h"

#include <atomic>
#include <map>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

using Tensors = std::vector<at::Tensor>;
using Splits = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::atomic<int64_t> next_recording{0};

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

// Forwards to `inner` and answers to its name, so that whatever is decided by the backend's name stays as it was.
class RecordingBackend final : public c10d::Backend {
 public:
  RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Recorder> recorder)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), recorder_(std::move(recorder)) {}
  ~RecordingBackend() override {
    if (!getGroupUid().empty()) c10d::unregister_process_group(getGroupUid());
  }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  void startCoalescing() override { inner_->startCoalescing(); }
  WorkPtr endCoalescing() override { return inner_->endCoalescing(); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void abort() override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                        const c10d::AllToAllOptions& options) override {
    const int64_t total = bytes_of(input);
    int64_t own = total / size_;
    if (!input_splits.empty()) {
      const int64_t rows = input.dim() > 0 ? input.size(0) : 1;
      const auto index = static_cast<size_t>(rank_);
      own = rows > 0 && index < input_splits.size() ? total / rows * input_splits[index] : 0;
    }
    record("all_to_all", total - own);
    return inner_->alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    record("all_to_all", bytes_to_others(inputs));
    return inner_->alltoall(outputs, inputs, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    record("all_gather", others() * bytes_of(input));
    return inner_->_allgather_base(output, input, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    record("all_gather", others() * bytes_of(inputs));
    return inner_->allgather(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    record("all_gather", others() * bytes_of(inputs));
    return inner_->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    record("reduce_scatter", bytes_of(input) - bytes_of(input) / size_);
    return inner_->_reduce_scatter_base(output, input, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    record("reduce_scatter", inputs.empty() ? 0 : bytes_to_others(inputs[0]));
    return inner_->reduce_scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    record("reduce_scatter", bytes_of(inputs) - bytes_of(inputs) / size_);
    return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    record("all_reduce", others() * bytes_of(tensors));
    return inner_->allreduce(tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    record("all_reduce", others() * bytes_of(tensors));
    return inner_->allreduce_coalesced(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    record("reduce", options.rootRank == rank_ ? 0 : bytes_of(tensors));
    return inner_->reduce(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    record("broadcast", options.rootRank == rank_ ? others() * bytes_of(tensors) : 0);
    return inner_->broadcast(tensors, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    record("gather", options.rootRank == rank_ ? 0 : bytes_of(inputs));
    return inner_->gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    record("scatter", options.rootRank == rank_ && !inputs.empty() ? bytes_to_others(inputs[0]) : 0);
    return inner_->scatter(outputs, inputs, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    record("barrier", 0);
    return inner_->barrier(options);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    record("send", bytes_of(tensors));
    return inner_->send(tensors, destination, tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    record("recv", 0);
    return inner_->recv(tensors, source, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    record("recv", 0);
    return inner_->recvAnysource(tensors, tag);
  }

 private:
  int64_t others() const { return size_ - 1; }
  int64_t bytes_to_others(const Tensors& per_rank) const {
    const auto own = static_cast<size_t>(rank_);
    return bytes_of(per_rank) - (own < per_rank.size() ? bytes_of(per_rank[own]) : 0);
  }
  void record(const char* name, int64_t bytes) { recorder_->add({name, bytes}); }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Recorder> recorder_;
};

}  // namespace

void Recorder::add(CollectiveRecord record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.push_back(std::move(record));
}

std::vector<CollectiveRecord> Recorder::records() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return records_;
}

void Recorder::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.clear();
}

c10::intrusive_ptr<c10d::ProcessGroup> record_group(const c10::intrusive_ptr<c10d::ProcessGroup>& inner,
                                                    std::shared_ptr<Recorder> recorder) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(inner->getRank(), inner->getSize());
  group->setBoundDeviceId(inner->getBoundDeviceId());
  std::map<c10d::Backend*, c10::intrusive_ptr<c10d::Backend>> recording;  // one backend can serve many devices
  for (const auto& device : inner->getDeviceTypes()) {
    const auto backend = inner->getBackend(device.type());
    auto& wrapped = recording[backend.get()];
    if (!wrapped) wrapped = c10::make_intrusive<RecordingBackend>(backend, recorder);
    group->setBackend(device.type(), c10d::ProcessGroup::strToBackendType(backend->getBackendName()), wrapped);
  }
  group->setDefaultBackend(inner->getBackendType());
  // Every rank of a thread world records in one process: the number makes the name unique.
  group->setGroupName(base::cat(inner->getGroupName(), ":recorded:", next_recording++));
  group->setGroupDesc(inner->getGroupDesc());
  c10d::register_process_group(group->getGroupName(), group);
  return group;
}

}  // namespace ulysses::transports
