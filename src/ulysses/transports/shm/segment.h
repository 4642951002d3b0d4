#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ulysses::transports {

// A POSIX shared-memory segment that is mapped here. Its name lives from create() until one process calls unlink(), or
// until an object that still owns it goes: a group whose start fails anywhere leaves nothing in /dev/shm.
// Errors: CP062.
class Segment {
 public:
  // Readable by this user alone, under a name that nobody can guess, with all of its memory allocated: a full /dev/shm
  // is an error here and not a SIGBUS later.
  static Segment create(int64_t bytes);
  // Empty if there is no segment of this name.
  static std::optional<Segment> open(const std::string& name);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }
  void unlink() noexcept;
  void disown() noexcept { name_.clear(); }  // another process unlinks it

 private:
  Segment(std::string name, int file, int64_t bytes);

  std::string name_;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace ulysses::transports
