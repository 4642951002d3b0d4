#include "ulysses/transports/collective/work.h"

#include <cstring>

#include "ulysses/base/text.h"
#include "ulysses/transports/collective/call.h"

namespace ulysses::transports {

DoneWork::DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> results)
    : Work(rank, type), results_(std::move(results)) {
  finish();
}

c10::intrusive_ptr<c10::ivalue::Future> DoneWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(results_));
  return future;
}

RecvWork::RecvWork(std::shared_ptr<Mail> mail, Mail::Address address, int64_t size, at::Tensor target,
                   std::chrono::milliseconds timeout)
    : Work(static_cast<int>(address.destination), c10d::OpType::RECV),
      mail_(std::move(mail)),
      address_(address),
      size_(size),
      ticket_(mail_->expect(address)),
      target_(std::move(target)),
      timeout_(timeout) {}

bool RecvWork::isCompleted() {
  if (!completed_ && mail_->has_message(address_, ticket_)) wait(timeout_);
  return completed_;
}

bool RecvWork::wait(std::chrono::milliseconds timeout) {
  if (completed_) return Work::wait(timeout);
  try {
    copy(mail_->take(address_, ticket_, timeout > kNoTimeout ? timeout : timeout_));
  } catch (...) {
    finishAndThrow(std::current_exception());
  }
  finish();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> RecvWork::getFuture() {
  wait(timeout_);
  return DoneWork(rank_, c10d::OpType::RECV, {target_}).getFuture();
}

void RecvWork::copy(const at::Tensor& message) {
  if (message.nbytes() != target_.nbytes() || message.scalar_type() != target_.scalar_type()) {
    raise_usable(base::cat("rank ", address_.source, " sent ", message.nbytes(), " bytes of ",
                           c10::toString(message.scalar_type()), " to rank ", address_.destination, ", which expects ",
                           target_.nbytes(), " bytes of ", c10::toString(target_.scalar_type())),
                 base::cat("receive into ", message.nbytes(), " bytes"), "recv", address_.destination, size_);
  }
  if (message.nbytes() == 0) return;
  if (is_plain(target_)) {
    std::memcpy(target_.mutable_data_ptr(), message.const_data_ptr(), message.nbytes());
  } else {
    copy_values(target_, message);
  }
}

}  // namespace ulysses::transports
