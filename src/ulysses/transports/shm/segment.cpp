#include "ulysses/transports/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

constexpr const char* kOtherTransport = "use backend=\"gloo\"";

// Closes the file at the end of a scope: a mapping does not need it.
struct File {
  int number;
  ~File() {
    if (number >= 0) ::close(number);
  }
};

[[noreturn]] void raise(std::string what, std::string fix) {
  throw base::Error({{"CP062", base::ErrorKind::kCommunication, std::move(what), "", std::move(fix)}}, "ulysses_shm");
}

[[noreturn]] void raise_system(const char* call, const std::string& name, int error) {
  raise(base::cat(call, "(\"", name, "\") failed: ", std::strerror(error)),
        base::cat("allow POSIX shared memory (/dev/shm) to this user, or ", kOtherTransport));
}

[[noreturn]] void raise_full(int64_t bytes) {
  constexpr int64_t kMiB = 1 << 20;
  struct statvfs space {};
  const bool known = ::statvfs("/dev/shm", &space) == 0;
  const auto free = static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
  const auto total = static_cast<int64_t>(space.f_blocks) * static_cast<int64_t>(space.f_frsize);
  const std::string state = known ? base::cat(free / kMiB, " of ", total / kMiB, " MiB are free") : "it is full";
  raise(base::cat("the group needs ", bytes, " bytes (", (bytes + kMiB - 1) / kMiB, " MiB) of /dev/shm, where ", state),
        base::cat("free at least ", (bytes - (known ? free : 0) + kMiB - 1) / kMiB,
                  " MiB there or make it larger (containers: --shm-size), or ", kOtherTransport));
}

std::string unguessable_name() {
  std::random_device random;
  std::string name = "/ulysses-";
  for (int digit = 0; digit < 32; ++digit) name += "0123456789abcdef"[random() & 15U];
  return name;
}

}  // namespace

Segment Segment::create(int64_t bytes) {
  const std::string name = unguessable_name();
  const File file{::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR)};
  if (file.number < 0) raise_system("shm_open", name, errno);
  int error = 0;
  do {
    error = ::posix_fallocate(file.number, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error == 0) return Segment(name, file.number, bytes);
  ::shm_unlink(name.c_str());
  if (error == ENOSPC || error == ENOMEM || error == EFBIG) raise_full(bytes);
  raise_system("posix_fallocate", name, error);
}

std::optional<Segment> Segment::open(const std::string& name) {
  const File file{::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0)};
  if (file.number < 0 && errno == ENOENT) return std::nullopt;
  if (file.number < 0) raise_system("shm_open", name, errno);
  struct stat status {};
  if (::fstat(file.number, &status) != 0) raise_system("fstat", name, errno);
  return Segment(name, file.number, static_cast<int64_t>(status.st_size));
}

Segment::Segment(std::string name, int file, int64_t bytes) : name_(std::move(name)), bytes_(bytes) {
  void* memory = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    const std::string kept = name_;
    unlink();  // no destructor runs
    raise_system("mmap", kept, error);
  }
  data_ = static_cast<std::byte*>(memory);
}

Segment::Segment(Segment&& other) noexcept
    : name_(std::exchange(other.name_, {})), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

Segment::~Segment() {
  unlink();
  if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(bytes_));
}

void Segment::unlink() noexcept {
  if (!name_.empty()) ::shm_unlink(name_.c_str());
  name_.clear();
}

}  // namespace ulysses::transports
