#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "ulysses/transports/collective/raise.h"

namespace ulysses::transports {

// Messages between two ranks, in order per source, destination and tag.
class Mail {
 public:
  struct Address {
    int64_t source = 0, destination = 0;
    int tag = 0;
    auto key() const { return std::tuple(source, destination, tag); }
  };
  virtual ~Mail() = default;
  virtual void post(const Address& address, const at::Tensor& message) = 0;  // copies the message
  virtual uint64_t expect(const Address& address) = 0;  // ticket of the next message, in the order of the calls
  virtual bool has_message(const Address& address, uint64_t ticket) = 0;
  virtual at::Tensor take(const Address& address, uint64_t ticket, std::chrono::milliseconds timeout) = 0;
};

// A work that was done before it was made.
class DoneWork final : public c10d::Work {
 public:
  DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> results);
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<at::Tensor> results_;
};

// Takes its message out of the mail when somebody waits or looks.
class RecvWork final : public c10d::Work {
 public:
  RecvWork(std::shared_ptr<Mail> mail, Mail::Address address, int64_t size, at::Tensor target,
           std::chrono::milliseconds timeout);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return static_cast<int>(address_.source); }
  std::vector<at::Tensor> result() override { return {target_}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void copy(const at::Tensor& message);

  std::shared_ptr<Mail> mail_;
  const Mail::Address address_;
  const int64_t size_;
  const uint64_t ticket_;
  at::Tensor target_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace ulysses::transports
