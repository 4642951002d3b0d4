#pragma once

#include <cstdint>
#include <functional>

namespace ulysses::kernels {

// step(begin, end) over disjoint ranges that cover [0, tasks), in parallel on torch's threads: at most
// at::get_num_threads() of them, one behind the other where the caller is itself one of them.
void run_tasks(int64_t tasks, const std::function<void(int64_t begin, int64_t end)>& step);

}  // namespace ulysses::kernels
