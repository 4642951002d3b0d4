#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ulysses/transports/shm/waiting.h"

namespace ulysses::transports {

inline constexpr int64_t kMaxShmRanks = 256;
inline constexpr int64_t kChunkBytes = 1 << 20;  // a multiple of every dtype's size
inline constexpr int64_t kLetters = 16;          // messages between two ranks that nobody has taken yet

using SharedNumber = std::atomic<uint64_t>;
static_assert(SharedNumber::is_always_lock_free);

// Note [One word decides]: `state` is 2 * (meetings that are complete) + (1 if the group is dead), modulo 2^32. Who
// sees that all ranks have come, and who gives up, both try to change this one word, so that a meeting is complete for
// every rank or for none, however close a timeout comes. No rank has a duty in between: one that is killed at any
// instruction leaves a state that the others can go on from.
struct SegmentHead {
  uint64_t magic = 0;
  uint64_t ranks = 0;
  alignas(64) Bell state;
  SharedWord killer{0};  // 1 + the rank whose last words say why the group is dead
};

struct alignas(64) RankRecord {
  SharedNumber pid{0}, start{0}, pid_namespace{0};
  SharedWord arrived{0};  // the latest meeting that this rank came to
  SharedWord op{0};       // kOps, of its latest call
  SharedNumber calls{0};
  SharedWord left{0};
  std::array<char, 2048> last_words{};  // "what\0fix\0", before `killer` names this rank
};

// What a rank says about its call, followed in memory by its 2 * ranks sizes: bytes to each rank, bytes from each.
struct alignas(64) Announcement {
  uint32_t op = 0;
  int32_t dtype = 0;
  int64_t root = -1;
  int64_t reduce_op = -1;
  uint32_t same_for_all = 0;
  std::array<char, 484> problem{};
};

struct Letter {
  int64_t tag = 0;
  int64_t dtype = 0;
  int64_t bytes = 0;
  int64_t file = -1;   // a descriptor of the sender's process
  uint64_t inode = 0;  // of the file, because a number that was closed is soon that of another
};

// Messages from one rank to another: what lies between `taken` and `posted`.
struct alignas(64) Letterbox {
  Bell posted, taken;
  std::array<Letter, kLetters> letters{};
};

inline constexpr uint64_t kSegmentMagic = 0x756c797373650001;  // the last digits: version of this layout

inline constexpr std::array<std::string_view, 13> kOps = {
    "nothing", "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast",
    "gather",  "scatter",    "barrier",    "send",           "recv",       "start"};

constexpr uint32_t number_of_op(std::string_view op) {
  for (uint32_t i = 0; i < kOps.size(); ++i) {
    if (kOps[i] == op) return i;
  }
  return 0;
}
constexpr std::string_view name_of_op(uint32_t number) { return kOps[number < kOps.size() ? number : 0]; }

// Where everything lies in a group's segment:
//   head | record of each rank | 2 announcements a rank | letterbox of each pair | 2 chunks a rank
// Units:  bytes = 2 MiB * ranks for the data, and about 3 KiB * ranks + 0.7 KiB * ranks^2 for the rest.
class ShmLayout {
 public:
  ShmLayout(std::byte* base, int64_t ranks) : base_(base), ranks_(ranks) {}

  int64_t ranks() const { return ranks_; }
  SegmentHead& head() const { return *reinterpret_cast<SegmentHead*>(base_); }
  RankRecord& record(int64_t rank) const { return *reinterpret_cast<RankRecord*>(base_ + records() + rank * kRecord); }
  Announcement& announcement(int64_t rank, int64_t half) const {
    return *reinterpret_cast<Announcement*>(base_ + announcements() + (2 * rank + half) * announcement_bytes());
  }
  int64_t* sizes(int64_t rank, int64_t half) const { return reinterpret_cast<int64_t*>(&announcement(rank, half) + 1); }
  Letterbox& letterbox(int64_t source, int64_t destination) const {
    return *reinterpret_cast<Letterbox*>(base_ + letterboxes() + (source * ranks_ + destination) * kLetterbox);
  }
  std::byte* chunk(int64_t rank, int64_t half) const { return base_ + chunks() + (2 * rank + half) * kChunkBytes; }

  int64_t bytes() const { return chunks() + 2 * ranks_ * kChunkBytes; }
  void make() const;  // of memory that is all zero

 private:
  static constexpr int64_t kRecord = sizeof(RankRecord);
  static constexpr int64_t kLetterbox = sizeof(Letterbox);
  static constexpr int64_t round_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

  int64_t announcement_bytes() const {
    return round_up(static_cast<int64_t>(sizeof(Announcement)) + 2 * ranks_ * static_cast<int64_t>(sizeof(int64_t)),
                    64);
  }
  static int64_t records() { return sizeof(SegmentHead); }
  int64_t announcements() const { return records() + ranks_ * kRecord; }
  int64_t letterboxes() const { return announcements() + 2 * ranks_ * announcement_bytes(); }
  int64_t chunks() const { return round_up(letterboxes() + ranks_ * ranks_ * kLetterbox, 4096); }

  std::byte* base_;
  int64_t ranks_;
};

}  // namespace ulysses::transports
