#include "ulysses/kernels/run_tasks.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

namespace ulysses::kernels {

// at::parallel_for is a template that runs in threads only where the file is compiled for OpenMP, and then in a runtime
// of its own beside torch's; without, it is a loop. An iterator's for_each() is compiled inside torch. It cuts a tensor
// of one byte per task, of which only the addresses are read.
void run_tasks(int64_t tasks, const std::function<void(int64_t begin, int64_t end)>& step) {
  if (tasks == 0) return;
  at::Tensor places = at::empty({tasks}, at::TensorOptions().dtype(at::kByte));
  const char* first = static_cast<const char*>(places.const_data_ptr());
  at::TensorIterator iterator = at::TensorIterator::nullary_op(places);
  const auto run = [&](char** data, const int64_t* strides, int64_t count, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t begin = data[0] + row * strides[1] - first;
      step(begin, begin + count);
    }
  };
  iterator.for_each(run, /*grain_size=*/1);
}

}  // namespace ulysses::kernels
