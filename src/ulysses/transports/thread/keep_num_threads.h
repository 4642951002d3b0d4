#pragma once

#include <ATen/Parallel.h>

namespace ulysses::transports {

// Restores the caller's intra-op setting at the end of a scope: what a rank thread sets reaches its caller and is what
// new threads inherit.
class KeepNumThreads {
 public:
  KeepNumThreads() : num_threads_(at::get_num_threads()) {}
  ~KeepNumThreads() { at::set_num_threads(num_threads_); }
  KeepNumThreads(const KeepNumThreads&) = delete;
  KeepNumThreads& operator=(const KeepNumThreads&) = delete;

 private:
  int num_threads_;
};

}  // namespace ulysses::transports
