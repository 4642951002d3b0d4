#include "ulysses/transports/shm/shm_mail.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

// Moves all bytes with read() or write(): 0, or what went wrong.
template <typename Transfer, typename Byte>
int transfer_all(Transfer transfer, int file, Byte* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t moved = transfer(file, data, bytes);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : EIO;
    data += moved;
    bytes -= static_cast<size_t>(moved);
  }
  return 0;
}

// 0 if the status cannot be had.
uint64_t inode_of(int file, size_t bytes) {
  struct stat status {};
  const bool known = ::fstat(file, &status) == 0 && static_cast<size_t>(status.st_size) == bytes;
  return known ? static_cast<uint64_t>(status.st_ino) : 0;
}

}  // namespace

ShmMail::ShmMail(std::shared_ptr<ShmHub> hub, std::chrono::milliseconds timeout)
    : hub_(std::move(hub)), meeting_(hub_->meeting()), timeout_(timeout) {}

ShmMail::~ShmMail() {
  for (const auto& sent : sent_) ::close(sent.file);
}

Letterbox& ShmMail::box(const Address& address) const {
  return meeting_.layout().letterbox(address.source, address.destination);
}

void ShmMail::lose(const std::string& what, const std::string& fix, const char* op) {
  meeting_.kill(what, fix);
  meeting_.raise_dead(op);
}

void ShmMail::close_taken() {
  const auto is_taken = [&](const Sent& sent) {
    const auto taken = box({meeting_.rank(), sent.destination, 0}).taken.word.load();
    return static_cast<int32_t>(taken - sent.number) > 0;
  };
  const auto kept = std::partition(sent_.begin(), sent_.end(), [&](const Sent& sent) { return !is_taken(sent); });
  std::for_each(kept, sent_.end(), [](const Sent& sent) { ::close(sent.file); });
  sent_.erase(kept, sent_.end());
}

void ShmMail::post(const Address& address, const at::Tensor& message) {
  meeting_.begin_call("send");
  const std::lock_guard<std::mutex> lock(sending_);
  close_taken();
  Letterbox& letters = box(address);
  const uint32_t number = letters.posted.word.load();
  const auto has_room = [&] { return number - letters.taken.word.load() < kLetters || meeting_.is_dead(); };
  const auto look = [&] {
    const std::string loss = meeting_.find_loss(address.destination);
    if (loss.empty()) return;
    lose(base::cat("rank ", address.source, " waits in send until a message is taken by ", loss),
         base::cat("find why rank ", address.destination, " is gone, then start the ranks again"), "send");
  };
  if (!wait_for(letters.taken, Clock::now() + timeout_, has_room, look)) {
    lose(base::cat("rank ", address.source, " waited ", timeout_.count(), " ms in send for rank ", address.destination,
                   ", which has not taken ", kLetters, " messages (", meeting_.describe(address.destination), ')'),
         base::cat("find why rank ", address.destination, " does not receive, then create the group again"), "send");
  }
  if (meeting_.is_dead()) meeting_.raise_dead("send");
  const int file = ::memfd_create("ulysses-message", MFD_CLOEXEC);
  const int error =
      file < 0 ? errno
               : transfer_all(::write, file, static_cast<const std::byte*>(message.const_data_ptr()), message.nbytes());
  if (error != 0) {
    if (file >= 0) ::close(file);
    raise_usable(base::cat("no memory for a message of ", message.nbytes(), " bytes: ", std::strerror(error)),
                 "send smaller messages, or receive them sooner", "send", meeting_.rank(), meeting_.size());
  }
  sent_.push_back({address.destination, number, file});
  letters.letters[number % kLetters] = {address.tag, static_cast<int64_t>(message.scalar_type()),
                                        static_cast<int64_t>(message.nbytes()), file, inode_of(file, message.nbytes())};
  letters.posted.word.store(number + 1);
  ring(letters.posted);
}

at::Tensor ShmMail::open_letter(const Letter& letter, const Address& address) {
  const auto& sender = meeting_.layout().record(address.source);
  const std::string path = base::cat("/proc/", sender.pid.load(), "/fd/", letter.file);
  const auto dtype = static_cast<at::ScalarType>(letter.dtype);
  at::Tensor message = at::empty({letter.bytes / static_cast<int64_t>(c10::elementSize(dtype))}, at::dtype(dtype));
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  int error = file < 0 ? errno : 0;
  if (file >= 0) {
    const bool same = inode_of(file, message.nbytes()) == letter.inode;
    error = same ? transfer_all(::read, file, static_cast<std::byte*>(message.mutable_data_ptr()), message.nbytes())
                 : ENOENT;
    ::close(file);
  }
  if (error == 0) return message;
  const std::string loss = meeting_.find_loss(address.source);
  lose(base::cat("rank ", address.destination, " cannot read a message of ",
                 loss.empty() ? base::cat("rank ", address.source, ": ", path, ": ", std::strerror(error)) : loss),
       "end the sender only after a barrier, and let this user read its own processes in /proc", "recv");
}

void ShmMail::read_letters(const Address& address) {
  Letterbox& letters = box(address);
  for (uint32_t number = letters.taken.word.load(); number != letters.posted.word.load(); ++number) {
    const Letter letter = letters.letters[number % kLetters];
    const Address to{address.source, address.destination, static_cast<int>(letter.tag)};
    at::Tensor message = open_letter(letter, to);
    Mailbox& mailbox = mail_[to.key()];
    mailbox.messages.emplace(mailbox.arrived++, std::move(message));
    letters.taken.word.store(number + 1);
    ring(letters.taken);
  }
}

uint64_t ShmMail::expect(const Address& address) {
  meeting_.begin_call("recv");
  const std::lock_guard<std::mutex> lock(receiving_);
  return mail_[address.key()].expected++;
}

bool ShmMail::has_message(const Address& address, uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(receiving_);
  read_letters(address);
  return mail_[address.key()].messages.count(ticket) > 0;
}

at::Tensor ShmMail::take(const Address& address, uint64_t ticket, std::chrono::milliseconds timeout) {
  const auto come = [&] { return has_message(address, ticket); };
  const auto look = [&] {
    const std::string loss = meeting_.find_loss(address.source);
    if (loss.empty() || come()) return;
    lose(base::cat("rank ", address.destination, " waits in recv (tag ", address.tag, ") for ", loss),
         base::cat("find why rank ", address.source, " is gone, then start the ranks again"), "recv");
  };
  const auto deadline = Clock::now() + timeout;
  if (!wait_for(
          box(address).posted, deadline, [&] { return come() || meeting_.is_dead(); }, look)) {
    lose(base::cat("rank ", address.destination, " waited ", timeout.count(), " ms in recv for rank ", address.source,
                   " (tag ", address.tag, "), which never sent (", meeting_.describe(address.source), ')'),
         base::cat("find why rank ", address.source, " did not send, or use a timeout above ", timeout.count(),
                   " ms; then create the group again"),
         "recv");
  }
  const std::lock_guard<std::mutex> lock(receiving_);
  Mailbox& mailbox = mail_[address.key()];
  const auto found = mailbox.messages.find(ticket);
  if (found == mailbox.messages.end()) meeting_.raise_dead("recv");
  at::Tensor message = std::move(found->second);
  mailbox.messages.erase(found);
  return message;
}

void ShmMail::leave(std::chrono::milliseconds at_most) {
  const auto deadline = Clock::now() + at_most;
  for (int64_t peer = 0; peer < meeting_.size(); ++peer) {
    Letterbox& letters = box({meeting_.rank(), peer, 0});
    bool lost = peer == meeting_.rank();
    const auto done = [&] { return letters.taken.word.load() == letters.posted.word.load(); };
    wait_for(
        letters.taken, deadline, [&] { return done() || lost || meeting_.is_dead(); },
        [&] { lost = !meeting_.find_loss(peer).empty(); });
  }
}

}  // namespace ulysses::transports
