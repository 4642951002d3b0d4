#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "ulysses/transports/collective/call.h"
#include "ulysses/transports/collective/work.h"

namespace ulysses::transports {

// What our transports have in common: torch's operations put together as contributions, and one exchange() that a
// transport moves them with. Collectives are done when the call returns, so that async_op=True gives a finished work;
// recv is done when its work is waited for, so that it may be posted before the send, and send never waits for it.
// Tensors: strided, on the CPU, any dtype. What is not contiguous is copied once.
// Reductions: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR in rank order, 8- and 16-bit floats accumulated in float32.
// The overridden names are those that every torch since 2.9 calls (see all_to_all_single in newer ones).
// Errors: CP062. What one rank's tensors break is raised on every rank.
class CollectiveBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Splits = std::vector<int64_t>;

  CollectiveBackend(int64_t rank, int64_t size, std::chrono::milliseconds timeout)
      : Backend(static_cast<int>(rank), static_cast<int>(size)), timeout_(timeout) {}
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  // torch compares how many collectives each rank has made, where its debug level asks for that.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }

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
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  // One after the other, each a collective of its own.
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;

 protected:
  // Meets the other ranks and fills `own.receive` with what they send. With own.reduce_op set, their blocks are
  // combined into `result` instead, where it is defined. If the ranks disagree nothing is moved and each of them
  // raises.
  virtual void exchange(Contribution own, std::chrono::milliseconds timeout, const at::Tensor& result) = 0;
  virtual std::shared_ptr<Mail> mail() = 0;

 private:
  WorkPtr run(Call& call, c10d::OpType type, std::chrono::milliseconds timeout, Tensors results,
              const at::Tensor& reduced = {});
  void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* op, std::chrono::milliseconds timeout);
  void check_message(const Tensors& tensors, int peer, const char* op) const;

  std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> calls_{0};
};

}  // namespace ulysses::transports
