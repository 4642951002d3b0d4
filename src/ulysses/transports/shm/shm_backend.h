#pragma once

#include <memory>
#include <string_view>

#include "ulysses/transports/collective/collective_backend.h"

namespace c10d {
class Store;
}

namespace ulysses::transports {

inline constexpr std::string_view kShmBackendName = "ulysses_shm";

class ShmHub;
class ShmMail;

// Ranks that are processes of one host, over one POSIX shared-memory segment a group: an ordinary torch.distributed
// backend, for test machines and ranks on the CPUs of one host. Linux only.
// Memory:  2 MiB of /dev/shm a rank and group, whatever the tensors' size; a message under way as much as it holds.
// Threads: groups are independent of each other; threads that call one group take turns.
// Every wait ends: with the data; at once with CP062 when a process of the group ends, naming the rank and its last
// call; with CP062 after the timeout, naming ranks that are stopped or never came. After that the group is dead and
// each later call says so. Ranks that call different collectives, or with sizes, dtypes, roots or reductions that don't
// match, all get the same CP062 with the values; nothing is exchanged and the group stays usable.
// Not offered: recv from any source, all_gather of lists of lists.
class ShmBackend final : public CollectiveBackend {
 public:
  // Collective over the group: returns when every rank has come. Errors: CP006, CP062.
  ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
             std::chrono::milliseconds timeout);
  ~ShmBackend() override;
  const std::string getBackendName() const override { return std::string(kShmBackendName); }
  void abort() override;
  void shutdown() override;  // waits up to 10 s for messages that nobody has taken

 private:
  void exchange(Contribution own, std::chrono::milliseconds timeout, const at::Tensor& result) override;
  std::shared_ptr<Mail> mail() override;
  bool is_forked() const;

  std::shared_ptr<ShmHub> hub_;
  std::shared_ptr<ShmMail> mail_;
  const int64_t pid_;
};

}  // namespace ulysses::transports
