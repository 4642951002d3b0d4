#include "ulysses/transports/shm/process_life.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

struct Stat {
  char state = '?';
  int64_t threads = 0;
  uint64_t start = 0;  // 0: there is no such process
};

Stat read_stat(int64_t pid) {
  std::ifstream file(base::cat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  const auto name_end = text.rfind(')');  // the name may hold spaces and parentheses
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  Stat stat;
  std::string skipped;
  fields >> stat.state;                                         // field 3 of proc(5)
  for (int field = 4; field <= 19; ++field) fields >> skipped;  // up to nice
  fields >> stat.threads >> skipped >> stat.start;              // 20, 21, 22
  return stat;
}

uint64_t own_namespace() {
  struct stat file {};
  return ::stat("/proc/self/ns/pid", &file) == 0 ? static_cast<uint64_t>(file.st_ino) : 0;
}

}  // namespace

ProcessId process(int64_t pid) { return {pid, read_stat(pid).start, own_namespace()}; }

ProcessId own_process() { return process(::getpid()); }

Life life_of(const ProcessId& process) {
  if (process.start == 0 || process.pid_namespace == 0 || process.pid_namespace != own_namespace()) {
    return Life::kUnknown;
  }
  const Stat stat = read_stat(process.pid);
  if (stat.start != process.start) return Life::kEnded;
  // The first thread of a process may be gone while others go on.
  const bool ended = (stat.state == 'Z' || stat.state == 'X') && stat.threads <= 1;
  if (ended) return Life::kEnded;
  return stat.state == 'T' || stat.state == 't' ? Life::kStopped : Life::kRunning;
}

std::string host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text;
}

}  // namespace ulysses::transports
