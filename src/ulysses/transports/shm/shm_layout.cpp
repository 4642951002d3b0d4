#include "ulysses/transports/shm/shm_layout.h"

#include <new>

namespace ulysses::transports {

void ShmLayout::make() const {
  new (&head()) SegmentHead();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    new (&record(rank)) RankRecord();
    for (int64_t half = 0; half < 2; ++half) new (&announcement(rank, half)) Announcement();
    for (int64_t peer = 0; peer < ranks_; ++peer) new (&letterbox(rank, peer)) Letterbox();
  }
  head().magic = kSegmentMagic;
  head().ranks = static_cast<uint64_t>(ranks_);
}

}  // namespace ulysses::transports
