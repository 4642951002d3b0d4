#pragma once

#include <memory>

#include "ulysses/transports/collective/collective_backend.h"
#include "ulysses/transports/thread/thread_hub.h"

namespace ulysses::transports {

// One rank's end of a ThreadHub as torch sees it. Errors: CP062.
class ThreadBackend final : public CollectiveBackend {
 public:
  ThreadBackend(std::shared_ptr<ThreadHub> hub, int64_t rank);
  const std::string getBackendName() const override;
  void abort() override;

 private:
  void exchange(Contribution own, std::chrono::milliseconds timeout, const at::Tensor& result) override;
  std::shared_ptr<Mail> mail() override { return hub_; }

  std::shared_ptr<ThreadHub> hub_;
};

}  // namespace ulysses::transports
