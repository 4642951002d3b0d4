#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace ulysses::transports {

// One collective as the group was handed it.
struct CollectiveRecord {
  std::string name;        // "all_to_all", "all_gather", …
  int64_t bytes_sent = 0;  // payload to other ranks, own block excluded, read off the buffers and splits
};

// Thread-safe list of what passed.
class Recorder {
 public:
  void add(CollectiveRecord record);
  std::vector<CollectiveRecord> records() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CollectiveRecord> records_;
};

// A group that forwards every collective to `inner` and records it first. Registered with c10d under a new name.
c10::intrusive_ptr<c10d::ProcessGroup> record_group(const c10::intrusive_ptr<c10d::ProcessGroup>& inner,
                                                    std::shared_ptr<Recorder> recorder);

}  // namespace ulysses::transports
