#include "ulysses/transports/shm/shm_join.h"

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr const char* kKey = "ulysses_shm";
// What the key holds: the segment's name and the host's id, one a line, or this and why there is no segment.
constexpr std::string_view kFailed = "failed\n";
// A store that served a group of the same name before may still hold the name of that one's segment.
constexpr std::chrono::milliseconds kWaitForName{10'000};

[[noreturn]] void raise(std::string what, std::string fix, int64_t rank, int64_t size,
                        base::ErrorKind kind = base::ErrorKind::kCommunication, const char* id = "CP062") {
  throw base::Error({{id, kind, std::move(what), "", std::move(fix)}}, "ulysses_shm", rank, size);
}

void refuse_bad_arguments(int64_t rank, int64_t size, std::chrono::milliseconds timeout) {
  if (size < 1 || size > kMaxShmRanks) {
    raise(base::cat("world_size=", size, " is not in 1 to ", kMaxShmRanks), "use backend=\"gloo\"", rank, size,
          base::ErrorKind::kInvalidArgument, "CP006");
  }
  if (rank < 0 || rank >= size) {
    raise(base::cat("rank=", rank, " of ", size, " ranks"), base::cat("use a rank from 0 to ", size - 1), rank, size,
          base::ErrorKind::kInvalidArgument);
  }
  if (timeout.count() <= 0) {
    raise(base::cat("timeout=", timeout.count(), " ms is not positive"), "use timeout=20000 ms", rank, size,
          base::ErrorKind::kInvalidArgument);
  }
}

Segment make_segment(const StorePtr& store, int64_t size) {
  const auto publish = [&](const std::string& text) {
    store->set(kKey, std::vector<uint8_t>(text.begin(), text.end()));
  };
  try {
    Segment segment = Segment::create(ShmLayout(nullptr, size).bytes());
    ShmLayout(segment.data(), size).make();
    publish(base::cat(segment.name(), '\n', host_id()));
    return segment;
  } catch (const base::Error& error) {
    publish(base::cat(kFailed, error.what()));  // the others would wait for a name until their timeout
    throw;
  }
}

std::string read_key(const StorePtr& store, int64_t rank, int64_t size, std::chrono::milliseconds timeout) {
  try {
    store->wait({kKey}, timeout);
    return store->get_to_str(kKey);
  } catch (const std::exception& error) {
    raise(base::cat("rank 0 named no segment within ", timeout.count(), " ms: ", base::first_line(error.what())),
          base::cat("find why rank 0 did not create the group, or use a timeout above ", timeout.count(), " ms"), rank,
          size);
  }
}

Segment open_segment(const StorePtr& store, int64_t rank, int64_t size, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + std::min(timeout, kWaitForName);
  while (true) {
    const std::string text = read_key(store, rank, size, timeout);
    if (text.starts_with(kFailed)) {
      raise(base::cat("rank 0 could not make the segment: ", text.substr(kFailed.size())), "see rank 0", rank, size);
    }
    const auto line = std::min(text.find('\n'), text.size() - 1);
    const std::string name = text.substr(0, line);
    if (text.substr(line + 1) != host_id()) {
      raise("this rank and rank 0 run on different hosts", "use backend=\"gloo\" across hosts", rank, size);
    }
    auto segment = Segment::open(name);
    if (segment && segment->bytes() == ShmLayout(nullptr, size).bytes()) {
      const SegmentHead& head = ShmLayout(segment->data(), size).head();
      if (head.magic == kSegmentMagic && head.ranks == static_cast<uint64_t>(size)) return std::move(*segment);
    }
    if (segment) {
      raise("rank 0 made the segment with another version of this library or for another number of ranks",
            "install one version for every rank", rank, size);
    }
    if (Clock::now() >= deadline) {
      raise(base::cat("the segment of rank 0, ", name, ", is not in this process's /dev/shm"),
            "let the ranks share one /dev/shm (containers: a common --ipc), or use backend=\"gloo\"", rank, size);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

std::shared_ptr<ShmHub> join_shm(const StorePtr& store, int64_t rank, int64_t size, std::chrono::milliseconds timeout) {
  refuse_bad_arguments(rank, size, timeout);
  Segment segment = rank == 0 ? make_segment(store, size) : open_segment(store, rank, size, timeout);
  auto hub = std::make_shared<ShmHub>(std::move(segment), size, rank);
  hub->meeting().meet("start", timeout);
  if (rank != 0) {
    hub->disown();
    return hub;
  }
  hub->unlink();
  try {
    store->deleteKey(kKey);          // so that a later group over the same keys does not find it
  } catch (const std::exception&) {  // a store that cannot delete; see kWaitForName
  }
  return hub;
}

}  // namespace ulysses::transports
