// Our CPU attention kernel against torch's fused op, kernels alone. Where the processor cannot run ours, what calls get
// there instead is measured: it may be slower than the bare op by 2 % at most. ULYSSES_CPU_FEATURES leaves features
// out, and ATEN_CPU_CAPABILITY=avx2 does so for torch.
//
// Usage: kernel_bench [--quick] [--json FILE]. Prints a table and what holds on this machine; exit 1 if something does
// not. Times are the shortest of many calls, the kernels in turns, so that what else the machine does hits both. With
// more at work than these threads, the rows of two threads say little and are not judged.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/Version.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bench/kernel/report.h"
#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/cpu_flash/features.h"

namespace ulysses::bench {
namespace {

using kernels::Kernel;
using kernels::KernelGrads;
using kernels::KernelOptions;
using kernels::KernelOutput;

constexpr int64_t kHeads = 4;
constexpr double kSecondsPerRow = 0.6;
constexpr int64_t kCheckedRows = 128;        // of out: float64 over all of them would take minutes
constexpr int64_t kMostCheckedGrads = 1024;  // tokens: the score matrix is held

struct Inputs {
  at::Tensor q, k, v, grad_out;
};

Inputs random_inputs(int64_t seq_len, int64_t head_dim, at::ScalarType dtype) {
  at::Generator generator = at::detail::createCPUGenerator(1);
  const auto random = [&] { return at::randn({1, seq_len, kHeads, head_dim}, generator, at::kFloat).to(dtype); };
  return {random(), random(), random(), random()};
}

double now(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Of one thread its own processor time, which others on the machine hardly touch; of several the wall clock.
template <typename Call>
double seconds(const Call& call) {
  const clockid_t clock = at::get_num_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  const double start = now(clock);
  call();
  return now(clock) - start;
}

// The shortest time of each, taking turns.
template <typename First, typename Second>
std::pair<double, double> shortest(const First& first, const Second& second) {
  std::pair<double, double> best{seconds(first), seconds(second)};
  const auto start = std::chrono::steady_clock::now();
  for (int calls = 0; calls < 3 || (calls < 2000 && std::chrono::steady_clock::now() - start <
                                                        std::chrono::duration<double>(kSecondsPerRow));
       ++calls) {
    best.first = std::min(best.first, seconds(first));
    best.second = std::min(best.second, seconds(second));
  }
  return best;
}

// Torch's op as one calls it, over views.
KernelOutput torch_forward(const Inputs& in, const KernelOptions& options) {
  const auto [out, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(in.q.transpose(1, 2), in.k.transpose(1, 2), in.v.transpose(1, 2),
                                                      0.0, false, std::nullopt, options.softmax_scale);
  return {out.transpose(1, 2), lse};
}

KernelGrads torch_backward(const Inputs& in, const KernelOutput& result, const KernelOptions& options) {
  const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      in.grad_out.transpose(1, 2), in.q.transpose(1, 2), in.k.transpose(1, 2), in.v.transpose(1, 2),
      result.out.transpose(1, 2), result.lse, 0.0, false, std::nullopt, options.softmax_scale);
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), {}, {}};
}

double rms(const at::Tensor& x, const at::Tensor& exact) {
  return (x.to(at::kDouble) - exact).square().mean().sqrt().item<double>();
}
double most(const at::Tensor& x, const at::Tensor& exact) {
  return (x.to(at::kDouble) - exact).abs().max().item<double>();
}

Inputs exact(const Inputs& in) {
  const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble); };
  return {wide(in.q), wide(in.k), wide(in.v), wide(in.grad_out)};
}

void add_forward_errors(Row& row, const Inputs& in, const KernelOutput& own, const KernelOutput& torch,
                        const KernelOptions& options) {
  const Inputs wide = exact(in);
  const int64_t rows = std::min(kCheckedRows, row.seq_len);
  const KernelOutput want = kernels::math_kernel().forward(wide.q.narrow(1, 0, rows), wide.k, wide.v, options);
  const auto head = [rows](const KernelOutput& x) { return x.out.narrow(1, 0, rows); };
  row.own_rms = rms(head(own), want.out), row.torch_rms = rms(head(torch), want.out);
  row.own_max = most(head(own), want.out), row.torch_max = most(head(torch), want.out);
  row.own_lse = most(own.lse.narrow(2, 0, rows), want.lse);
  row.torch_lse = most(torch.lse.narrow(2, 0, rows), want.lse);
}

void add_backward_errors(Row& row, const Inputs& in, const KernelGrads& own, const KernelGrads& torch,
                         const KernelOptions& options) {
  const Inputs wide = exact(in);
  const KernelOutput out = kernels::math_kernel().forward(wide.q, wide.k, wide.v, options);
  const KernelGrads want =
      kernels::math_kernel().backward(wide.grad_out, {}, wide.q, wide.k, wide.v, out.out, out.lse, options);
  const auto worst = [&](const KernelGrads& got, double (*error)(const at::Tensor&, const at::Tensor&)) {
    return std::max({error(got.dq, want.dq), error(got.dk, want.dk), error(got.dv, want.dv)});
  };
  row.own_rms = worst(own, rms), row.torch_rms = worst(torch, rms);
  row.own_max = worst(own, most), row.torch_max = worst(torch, most);
}

Row measure(Row row, const Kernel& own, at::ScalarType dtype) {
  const KernelOptions options{.softmax_scale = 1.0 / std::sqrt(static_cast<double>(row.head_dim))};
  const Inputs in = random_inputs(row.seq_len, row.head_dim, dtype);
  row.num_heads = kHeads;
  at::set_num_threads(static_cast<int>(row.threads));
  KernelOutput own_out = own.forward(in.q, in.k, in.v, options), torch_out = torch_forward(in, options);
  if (row.direction == "forward") {
    std::tie(row.own_seconds, row.torch_seconds) = shortest([&] { own_out = own.forward(in.q, in.k, in.v, options); },
                                                            [&] { torch_out = torch_forward(in, options); });
    add_forward_errors(row, in, own_out, torch_out, options);
    return row;
  }
  KernelGrads own_grads, torch_grads;
  std::tie(row.own_seconds, row.torch_seconds) =
      shortest([&] { own_grads = own.backward(in.grad_out, {}, in.q, in.k, in.v, own_out.out, own_out.lse, options); },
               [&] { torch_grads = torch_backward(in, torch_out, options); });
  row.has_errors = row.seq_len <= kMostCheckedGrads;
  if (row.has_errors) add_backward_errors(row, in, own_grads, torch_grads, options);
  return row;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

std::vector<Row> measure_all(bool quick) {
  struct Type {
    const char* name;
    at::ScalarType dtype;
  };
  std::vector<Row> rows;
  for (const Type& type : {Type{"bfloat16", at::kBFloat16}, {"float32", at::kFloat}, {"float16", at::kHalf}}) {
    const auto features = kernels::flash::features();
    const bool can_run = kernels::flash::instance_for(features, type.name) != nullptr;
    const Kernel& own = can_run ? kernels::cpu_flash_kernel() : kernels::fused_cpu_kernel();
    if (!can_run) std::cout << type.name << ": this processor cannot run cpu_flash; torch's op is called\n";
    for (const char* direction : {"forward", "backward"}) {
      for (const int64_t threads : {1, 2}) {
        for (const int64_t head_dim : {64, 128}) {
          for (const int64_t seq_len : {256, 1024, 4096}) {
            // Torch's float16 backward takes ten times as long as float32's.
            const bool too_slow = type.dtype == at::kHalf && seq_len > (direction[0] == 'b' ? 256 : 1024);
            if (too_slow || (quick && seq_len > 1024)) continue;
            Row row;
            row.dtype = type.name, row.direction = direction;
            row.threads = threads, row.head_dim = head_dim, row.seq_len = seq_len;
            row.kernel = own.name(), row.is_auto = !can_run || kernels::flash::is_first_choice(features, type.name);
            rows.push_back(measure(row, own, type.dtype));
            std::cerr << type.name << ' ' << direction << ' ' << threads << " threads D=" << head_dim
                      << " S=" << seq_len << '\n';
          }
        }
      }
    }
  }
  return rows;
}

int run(int argc, char** argv) {
  bool quick = false;
  std::string file;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--quick") {
      quick = true;
    } else if (word == "--json" && i + 1 < argc) {
      file = argv[++i];
    } else {
      std::cerr << "kernel_bench: " << word << " is unknown. Fix: kernel_bench [--quick] [--json FILE]\n";
      return 2;
    }
  }
  const std::vector<Row> rows = measure_all(quick);
  bool all_hold = false;
  double load = 0.0;
  getloadavg(&load, 1);
  const kernels::flash::Features features = kernels::flash::features();
  const std::string found =
      verdict(rows, features.avx512_bf16, load - 2.0, &all_hold);  // the last rows ran two threads
  const std::string processor = processor_name() + "; ours may use " + kernels::flash::describe(features) +
                                "; torch's op " + at::get_cpu_capability();
  std::cout << "# cpu_flash against torch's fused op\n\n" << processor << "\n\n" << markdown(rows) << '\n' << found;
  if (!file.empty()) std::ofstream(file) << json(rows, processor);
  return all_hold ? 0 : 1;
}

}  // namespace
}  // namespace ulysses::bench

int main(int argc, char** argv) { return ulysses::bench::run(argc, argv); }
