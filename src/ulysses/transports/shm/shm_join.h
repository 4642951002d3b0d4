#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "ulysses/transports/shm/shm_hub.h"

namespace c10d {
class Store;
}

namespace ulysses::transports {

// Makes (rank 0) or opens the segment of a group; its name passes the group's store. Returns when every rank has it
// and its name is gone from /dev/shm. Errors: CP006 (number of ranks), CP062.
std::shared_ptr<ShmHub> join_shm(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
                                 std::chrono::milliseconds timeout);

}  // namespace ulysses::transports
