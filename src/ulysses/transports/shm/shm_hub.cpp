#include "ulysses/transports/shm/shm_hub.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/transports/collective/combine.h"
#include "ulysses/transports/collective/raise.h"

namespace ulysses::transports {
namespace {

// A block that stays with its rank is not put into the stream, unless it is combined: then the pieces of every source
// lie at the same place of their streams.
bool is_in_stream(const Contribution& call, int64_t source, int64_t destination) {
  return call.same_for_all || call.reduce_op >= 0 || source != destination;
}

int64_t begin_of_block(const Contribution& call, int64_t source, int64_t destination) {
  int64_t begin = 0;
  for (int64_t peer = 0; !call.same_for_all && peer < destination; ++peer) {
    if (is_in_stream(call, source, peer)) begin += call.send[static_cast<size_t>(peer)].bytes;
  }
  return begin;
}

int64_t bytes_of_stream(const Contribution& call, int64_t source) {
  if (call.same_for_all) return call.send.front().bytes;
  return begin_of_block(call, source, static_cast<int64_t>(call.send.size()));
}

}  // namespace

ShmHub::ShmHub(Segment segment, int64_t ranks, int64_t rank)
    : segment_(std::move(segment)), meeting_(ShmLayout(segment_.data(), ranks), rank) {}

void ShmHub::announce(const Contribution& own, int64_t half) const {
  const auto& layout = meeting_.layout();
  Announcement& call = layout.announcement(meeting_.rank(), half);
  call.op = number_of_op(own.op);
  call.dtype = static_cast<int32_t>(own.dtype);
  call.root = own.root;
  call.reduce_op = own.reduce_op;
  call.same_for_all = own.same_for_all ? 1 : 0;
  const size_t length = std::min(own.problem.size(), call.problem.size() - 1);
  std::memcpy(call.problem.data(), own.problem.data(), length);
  call.problem[length] = '\0';
  int64_t* sizes = layout.sizes(meeting_.rank(), half);
  for (const auto& block : own.send) *sizes++ = block.bytes;
  for (const auto& block : own.receive) *sizes++ = block.bytes;
}

std::vector<Contribution> ShmHub::read_announcements(int64_t half) const {
  const auto& layout = meeting_.layout();
  std::vector<Contribution> calls;
  for (int64_t rank = 0; rank < layout.ranks(); ++rank) {
    const Announcement& said = layout.announcement(rank, half);
    Contribution& call = calls.emplace_back(name_of_op(said.op), layout.ranks());
    call.dtype = static_cast<at::ScalarType>(said.dtype);
    call.root = said.root;
    call.reduce_op = said.reduce_op;
    call.same_for_all = said.same_for_all != 0;
    call.problem = said.problem.data();
    const int64_t* sizes = layout.sizes(rank, half);
    for (auto& block : call.send) block.bytes = *sizes++;
    for (auto& block : call.receive) block.bytes = *sizes++;
  }
  return calls;
}

void ShmHub::exchange(const Contribution& own, std::chrono::milliseconds timeout, const at::Tensor& result) {
  const Turns::Turn turn(calls_, timeout);
  if (!turn.held()) {
    raise_usable(base::cat("another thread of this rank has been in a call of this group for ", timeout.count(), " ms"),
                 "call a group from one thread, or make a group for each", own.op, meeting_.rank(), meeting_.size());
  }
  meeting_.begin_call(own.op);
  const int64_t half = meeting_.next_half();
  announce(own, half);
  if (own.problem.empty()) write_chunk(own, 0, half);
  meeting_.meet(own.op, timeout);
  try {
    const auto calls = read_announcements(half);
    const std::string disagreement = find_disagreement(calls);
    if (!disagreement.empty()) raise_disagreement(disagreement, own.op, meeting_.rank(), meeting_.size());
    move(own, calls, timeout, result);
  } catch (const base::Error&) {
    throw;  // the others get one too
  } catch (const std::exception& error) {
    meeting_.kill(base::cat("rank ", meeting_.rank(), " failed in ", own.op, ": ", base::first_line(error.what())),
                  base::cat("repair the failure of rank ", meeting_.rank(), " and start the ranks again"));
    meeting_.raise_dead(own.op);
  }
}

void ShmHub::move(const Contribution& own, const std::vector<Contribution>& calls, std::chrono::milliseconds timeout,
                  const at::Tensor& result) {
  const auto rank = static_cast<size_t>(meeting_.rank());
  const auto& kept = own.send[rank];
  const auto& to = own.receive[rank];
  if (to.data != nullptr && to.bytes > 0 && to.data != kept.data) {
    std::memcpy(to.data, kept.data, static_cast<size_t>(to.bytes));
  }
  int64_t longest = 0;
  for (int64_t source = 0; source < meeting_.size(); ++source) {
    longest = std::max(longest, bytes_of_stream(calls[static_cast<size_t>(source)], source));
  }
  int64_t half = 1 - meeting_.next_half();  // of the meeting that has just been
  for (int64_t begin = 0; begin < longest; begin += kChunkBytes) {
    if (begin > 0) {
      half = meeting_.next_half();
      write_chunk(own, begin, half);
      meeting_.meet(own.op, timeout);
    }
    read_chunks(own, calls, begin, result, half);
  }
}

void ShmHub::write_chunk(const Contribution& own, int64_t begin, int64_t half) const {
  const int64_t rank = meeting_.rank();
  std::byte* chunk = meeting_.layout().chunk(rank, half);
  int64_t position = 0;  // of a block in the stream
  for (int64_t peer = 0; peer < meeting_.size(); ++peer) {
    const auto& block = own.send[static_cast<size_t>(peer)];
    if (!is_in_stream(own, rank, peer)) continue;
    const int64_t from = std::max(begin, position), to = std::min(begin + kChunkBytes, position + block.bytes);
    if (from < to) std::memcpy(chunk + from - begin, block.data + from - position, static_cast<size_t>(to - from));
    if (own.same_for_all) break;
    position += block.bytes;
  }
}

// What the chunk of `source` that begins there holds of its block for this rank.
ShmHub::Piece ShmHub::find_piece(const Contribution& call, int64_t source, int64_t begin, int64_t half) const {
  const int64_t rank = meeting_.rank();
  if (!is_in_stream(call, source, rank)) return {};
  const int64_t position = begin_of_block(call, source, rank);
  const int64_t from = std::max(begin, position);
  const int64_t to = std::min(begin + kChunkBytes, position + call.send[static_cast<size_t>(rank)].bytes);
  if (from >= to) return {};
  return {from - position, meeting_.layout().chunk(source, half) + from - begin, to - from};
}

void ShmHub::read_chunks(const Contribution& own, const std::vector<Contribution>& calls, int64_t begin,
                         const at::Tensor& result, int64_t half) const {
  std::vector<const std::byte*> blocks;
  Piece piece;
  for (int64_t step = 0; step < meeting_.size(); ++step) {
    // Copies begin with different sources, so that ranks don't queue for one memory; combining keeps the order.
    const int64_t source = own.reduce_op >= 0 ? step : (meeting_.rank() + step) % meeting_.size();
    if (own.reduce_op < 0 && source == meeting_.rank()) continue;  // it stayed here
    piece = find_piece(calls[static_cast<size_t>(source)], source, begin, half);
    if (piece.bytes == 0) continue;
    if (own.reduce_op >= 0) {
      blocks.push_back(piece.data);
    } else {
      std::byte* to = own.receive[static_cast<size_t>(source)].data;
      std::memcpy(to + piece.offset, piece.data, static_cast<size_t>(piece.bytes));
    }
  }
  if (blocks.empty() || !result.defined()) return;
  const at::Tensor part =
      combine(blocks, piece.bytes / static_cast<int64_t>(result.element_size()), result.scalar_type(), own.reduce_op);
  auto* memory = static_cast<std::byte*>(result.mutable_data_ptr());
  std::memcpy(memory + piece.offset, part.const_data_ptr(), static_cast<size_t>(piece.bytes));
}

}  // namespace ulysses::transports
