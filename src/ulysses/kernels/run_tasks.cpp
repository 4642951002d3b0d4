#include "ulysses/kernels/run_tasks.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <atomic>

namespace ulysses::kernels {
namespace {

// torch's threads meet inside torch, where ThreadSanitizer does not look. Counting meetings says the same where it
// does: what was written before a task is there for it, and what it wrote for whoever goes on. One for all calls,
// because a task must find it before it reads anything else of its call.
std::atomic<int64_t> meetings{0};

void leave() { meetings.fetch_add(1, std::memory_order_acq_rel); }
void arrive() { meetings.load(std::memory_order_acquire); }

// At the end of a scope, by an exception too.
struct Leaves {
  ~Leaves() { leave(); }
};
struct Arrives {
  ~Arrives() { arrive(); }
};

}  // namespace

// at::parallel_for is a template that runs in threads only where the file is compiled for OpenMP, and then in a runtime
// of its own beside torch's; without, it is a loop. An iterator's for_each() is compiled inside torch. It cuts a tensor
// of one byte per task, of which only the addresses are read.
void run_tasks(int64_t tasks, const std::function<void(int64_t begin, int64_t end)>& step) {
  if (tasks == 0) return;
  at::Tensor places = at::empty({tasks}, at::TensorOptions().dtype(at::kByte));
  const char* first = static_cast<const char*>(places.const_data_ptr());
  at::TensorIterator iterator = at::TensorIterator::nullary_op(places);
  const auto run = [&](char** data, const int64_t* strides, int64_t count, int64_t rows) {
    arrive();
    const Leaves after_tasks;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t begin = data[0] + row * strides[1] - first;
      step(begin, begin + count);
    }
  };
  leave();
  const Arrives after_all;
  iterator.for_each(run, /*grain_size=*/1);
}

}  // namespace ulysses::kernels
