#pragma once

#include <cstdint>
#include <string>

namespace ulysses::transports {

// A process, so that another one that got its number later is not taken for it.
struct ProcessId {
  int64_t pid = 0;
  uint64_t start = 0;          // clock ticks since the host started
  uint64_t pid_namespace = 0;  // only within one do numbers mean the same
};

enum class Life {
  kRunning,
  kStopped,  // by a signal or a debugger
  kEnded,    // also when nobody has waited for it yet
  kUnknown,  // in another pid namespace, or there is no /proc
};

ProcessId process(int64_t pid);  // of this pid namespace; start 0 if there is none
ProcessId own_process();
Life life_of(const ProcessId& process);
// Differs between hosts and between starts of one host; empty where the system does not say.
std::string host_id();

}  // namespace ulysses::transports
