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

// One call as the group was handed it. Bytes by the meaning of the collective, not by a backend's algorithm: an
// all_reduce gives its tensor to each other rank, a reduce_scatter a part to each, a recv or barrier sends nothing.
struct CollectiveRecord {
  std::string name;        // all_to_all, all_gather, reduce_scatter, all_reduce, broadcast, send, recv, barrier, …
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

// A group that forwards every collective to `inner` and records it first. Works for any process group; answers to the
// backend names of `inner`. Registered with c10d under a new name for as long as somebody holds it.
c10::intrusive_ptr<c10d::ProcessGroup> record_group(const c10::intrusive_ptr<c10d::ProcessGroup>& inner,
                                                    std::shared_ptr<Recorder> recorder);

}  // namespace ulysses::transports
