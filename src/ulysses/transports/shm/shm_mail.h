#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "ulysses/transports/collective/work.h"
#include "ulysses/transports/shm/shm_hub.h"

namespace ulysses::transports {

// Messages between the processes of a group. A message is a file without a name (memfd) of the sender's process; only
// its number passes the segment, and the receiver opens it through /proc. So a message takes as much memory as it
// needs, for as long as it is under way, and nothing of it remains when a process is killed.
// post() copies and returns, unless 16 messages to the same rank have not been taken. A sender that ends takes its
// messages with it: leave() waits for those that nobody has taken yet.
// Errors: CP062; after one of take() the group is dead.
class ShmMail final : public Mail {
 public:
  ShmMail(std::shared_ptr<ShmHub> hub, std::chrono::milliseconds timeout);
  ~ShmMail() override;
  void post(const Address& address, const at::Tensor& message) override;
  uint64_t expect(const Address& address) override;
  bool has_message(const Address& address, uint64_t ticket) override;
  at::Tensor take(const Address& address, uint64_t ticket, std::chrono::milliseconds timeout) override;
  void leave(std::chrono::milliseconds at_most);

 private:
  struct Mailbox {
    uint64_t arrived = 0, expected = 0;
    std::map<uint64_t, at::Tensor> messages;
  };
  struct Sent {
    int64_t destination = 0;
    uint32_t number = 0;
    int file = -1;
  };

  Letterbox& box(const Address& address) const;
  void close_taken();
  void read_letters(const Address& address);
  at::Tensor open_letter(const Letter& letter, const Address& address);
  [[noreturn]] void lose(const std::string& what, const std::string& fix, const char* op);

  std::shared_ptr<ShmHub> hub_;
  ShmMeeting& meeting_;
  const std::chrono::milliseconds timeout_;
  std::mutex sending_, receiving_;  // each guards one of the two below
  std::vector<Sent> sent_;
  std::map<std::tuple<int64_t, int64_t, int>, Mailbox> mail_;
};

}  // namespace ulysses::transports
