#include "ulysses/transports/shm/shm_backend.h"

#include <unistd.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "ulysses/base/text.h"
#include "ulysses/transports/shm/shm_join.h"
#include "ulysses/transports/shm/shm_mail.h"

namespace ulysses::transports {

ShmBackend::ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
                       std::chrono::milliseconds timeout)
    : CollectiveBackend(rank, size, timeout),
      hub_(join_shm(store, rank, size, timeout)),
      mail_(std::make_shared<ShmMail>(hub_, timeout)),
      pid_(::getpid()) {}

ShmBackend::~ShmBackend() {
  if (!is_forked()) hub_->meeting().leave();
}

// A child of the rank's process has a copy of this object and is not the rank.
bool ShmBackend::is_forked() const { return ::getpid() != pid_; }

void ShmBackend::abort() {
  hub_->meeting().kill(base::cat("rank ", rank_, " failed: its group was aborted"),
                       base::cat("repair the failure of rank ", rank_, " and start the ranks again"));
}

void ShmBackend::shutdown() {
  if (is_forked()) return;
  mail_->leave(std::chrono::seconds(10));
  hub_->meeting().leave();
}

void ShmBackend::exchange(Contribution own, std::chrono::milliseconds timeout, const at::Tensor& result) {
  hub_->exchange(own, timeout, result);
}

std::shared_ptr<Mail> ShmBackend::mail() { return mail_; }

}  // namespace ulysses::transports
