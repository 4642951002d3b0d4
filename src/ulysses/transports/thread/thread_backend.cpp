#include "ulysses/transports/thread/thread_backend.h"

#include <cstring>
#include <utility>

#include "ulysses/transports/collective/combine.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::transports {
namespace {

at::Tensor combine_blocks(const ThreadHub& hub, int64_t rank, const at::Tensor& like) {
  std::vector<const std::byte*> blocks;
  for (int64_t peer = 0; peer < hub.size(); ++peer) {
    blocks.push_back(hub.contribution(peer).send[static_cast<size_t>(rank)].data);
  }
  return combine(blocks, like.numel(), like.scalar_type(), hub.contribution(rank).reduce_op);
}

}  // namespace

ThreadBackend::ThreadBackend(std::shared_ptr<ThreadHub> hub, int64_t rank)
    : CollectiveBackend(rank, hub->size(), hub->timeout()), hub_(std::move(hub)) {}

const std::string ThreadBackend::getBackendName() const { return std::string(kThreadBackendName); }

void ThreadBackend::abort() { hub_->abort(rank_, "its group was aborted"); }

void ThreadBackend::exchange(Contribution own, std::chrono::milliseconds timeout, const at::Tensor& result) {
  at::Tensor reduced;
  hub_->exchange(rank_, std::move(own), timeout, [&] {
    if (result.defined() && result.numel() > 0) reduced = combine_blocks(*hub_, rank_, result);
  });
  // Only now may the result be written: it can be a part of what the peers have just read.
  if (reduced.defined()) std::memcpy(result.mutable_data_ptr(), reduced.const_data_ptr(), result.nbytes());
}

}  // namespace ulysses::transports
