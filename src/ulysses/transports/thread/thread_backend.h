#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "ulysses/transports/thread/thread_hub.h"

namespace ulysses::transports {

// One rank's end of a ThreadHub as torch sees it. Collectives are done when the call returns; recv when its work is
// waited for, so that a recv may be posted before the send. Tensors: dense, contiguous, on the CPU, any dtype.
// Reductions: SUM, AVG, PRODUCT, MIN, MAX in rank order, 16-bit floats accumulated in float32.
// The overridden names are those that every torch since 2.9 calls (see all_to_all_single in newer ones).
// Errors: CP062.
class ThreadBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Splits = std::vector<int64_t>;

  ThreadBackend(std::shared_ptr<ThreadHub> hub, int64_t rank);
  const std::string getBackendName() const override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override;

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;

 private:
  std::chrono::milliseconds choose_timeout(std::chrono::milliseconds of_call) const;
  WorkPtr move_blocks(c10d::OpType type, std::chrono::milliseconds timeout, Tensors results);
  WorkPtr reduce_blocks(c10d::OpType type, std::chrono::milliseconds timeout, const at::Tensor& result);
  void check_peer(int peer, const char* op) const;

  std::shared_ptr<ThreadHub> hub_;
  std::chrono::milliseconds timeout_;
};

}  // namespace ulysses::transports
