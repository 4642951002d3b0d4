#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/transports/thread/thread_hub.h"

namespace ulysses::transports {

// For an error of one rank that leaves the world as it was.
[[noreturn]] inline void raise_usable(std::string what, std::string fix, const char* op, int64_t rank, int64_t size) {
  throw base::Error(
      {{"CP062", base::ErrorKind::kCommunication, std::move(what), "The group is still usable", std::move(fix)}}, op,
      rank, size);
}

// A work that was done before it was made.
class DoneWork final : public c10d::Work {
 public:
  DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> results)
      : Work(rank, type), results_(std::move(results)) {
    finish();
  }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  std::vector<at::Tensor> results_;
};

// Takes its message out of the mailbox when somebody waits or looks. Used by the rank's own thread.
class RecvWork final : public c10d::Work {
 public:
  RecvWork(std::shared_ptr<ThreadHub> hub, ThreadHub::Address address, at::Tensor target,
           std::chrono::milliseconds timeout)
      : Work(static_cast<int>(address.destination), c10d::OpType::RECV),
        hub_(std::move(hub)),
        address_(address),
        ticket_(hub_->expect(address)),
        target_(std::move(target)),
        timeout_(timeout) {}

  bool isCompleted() override {
    if (!completed_ && hub_->has_message(address_, ticket_)) wait(timeout_);
    return completed_;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (completed_) return Work::wait(timeout);
    try {
      copy(hub_->take(address_, ticket_, timeout > kNoTimeout ? timeout : timeout_));
    } catch (...) {
      finishAndThrow(std::current_exception());
    }
    finish();
    return true;
  }
  int sourceRank() const override { return static_cast<int>(address_.source); }
  std::vector<at::Tensor> result() override { return {target_}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(timeout_);
    return DoneWork(rank_, c10d::OpType::RECV, {target_}).getFuture();
  }

 private:
  void copy(const at::Tensor& message) {
    if (message.nbytes() != target_.nbytes() || message.scalar_type() != target_.scalar_type()) {
      raise_usable(base::cat("rank ", address_.source, " sent ", message.nbytes(), " bytes of ",
                             c10::toString(message.scalar_type()), " to rank ", address_.destination,
                             ", which expects ", target_.nbytes(), " bytes of ", c10::toString(target_.scalar_type())),
                   base::cat("receive into ", message.nbytes(), " bytes"), "recv", address_.destination, hub_->size());
    }
    if (message.nbytes() > 0) std::memcpy(target_.mutable_data_ptr(), message.const_data_ptr(), message.nbytes());
  }

  std::shared_ptr<ThreadHub> hub_;
  const ThreadHub::Address address_;
  const uint64_t ticket_;
  at::Tensor target_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace ulysses::transports
