#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "ulysses/transports/collective/contribution.h"
#include "ulysses/transports/shm/segment.h"
#include "ulysses/transports/shm/shm_meeting.h"
#include "ulysses/transports/shm/turns.h"

namespace ulysses::transports {

// How data passes between the processes of a group. A rank's blocks, one behind the other, are its stream; it goes
// through the rank's two chunks of the segment in turn:
//
//   write call and first chunk │ meet │ compare calls, read │ write next chunk into the other half │ meet │ read …
//
// A half is written again for the next meeting but one, so not before the next one is complete, and a rank comes to
// that only when it has read everything before: one meeting a chunk is enough. A collective of up to 1 MiB a rank costs
// one meeting. Two threads that call at once take turns, in no order: ranks whose threads do so agree on the order
// themselves. Errors: CP062. If the ranks disagree nothing is moved, every rank gets the same text, and the group stays
// usable.
class ShmHub {
 public:
  ShmHub(Segment segment, int64_t ranks, int64_t rank);

  ShmMeeting& meeting() { return meeting_; }
  // result: see CollectiveBackend::exchange.
  void exchange(const Contribution& own, std::chrono::milliseconds timeout, const at::Tensor& result);
  void unlink() noexcept { segment_.unlink(); }
  void disown() noexcept { segment_.disown(); }

 private:
  struct Piece {
    int64_t offset = 0;  // in its block
    const std::byte* data = nullptr;
    int64_t bytes = 0;
  };

  void announce(const Contribution& own, int64_t half) const;
  std::vector<Contribution> read_announcements(int64_t half) const;
  void move(const Contribution& own, const std::vector<Contribution>& calls, std::chrono::milliseconds timeout,
            const at::Tensor& result);
  void write_chunk(const Contribution& own, int64_t begin, int64_t half) const;
  Piece find_piece(const Contribution& call, int64_t source, int64_t begin, int64_t half) const;
  void read_chunks(const Contribution& own, const std::vector<Contribution>& calls, int64_t begin,
                   const at::Tensor& result, int64_t half) const;

  Segment segment_;
  ShmMeeting meeting_;
  Turns calls_;
};

}  // namespace ulysses::transports
