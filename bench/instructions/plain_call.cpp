// Calls that valgrind counts: the plain Ulysses call of a rank of two whose collectives return at once, with a local
// kernel that computes nothing. What is left is what the operation itself costs: checks, packing, autograd.
//   plain_call N   runs each kind of call N and then 2 N times, with a callgrind dump behind each: "cpp_forward N", …
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>
#include <torch/version.h>
#include <ulysses/ulysses.h>
#include <valgrind/callgrind.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

namespace {

constexpr int64_t kRanks = 2;
constexpr const char* kGroupName = "silent";
int64_t kernel_calls = 0;

struct DoneWork final : c10d::Work {
  bool wait(std::chrono::milliseconds) override { return true; }
  bool isCompleted() override { return true; }
};

// Rank 0 of two. What the other rank would send stays whatever is in memory, but for the comparison of the ranks on the
// first call, in which it says the same.
struct SilentBackend final : c10d::Backend {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Splits = std::vector<int64_t>;
  SilentBackend() : Backend(/*rank=*/0, static_cast<int>(kRanks)) {}
  const std::string getBackendName() const override { return "silent"; }
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, Splits&, Splits&, const c10d::AllToAllOptions&) override {
    return done;
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    output.view({kRanks, -1}).copy_(input.view({1, -1}));
    return done;
  }
  WorkPtr done = c10::make_intrusive<DoneWork>();
};

ulysses::Group silent_group() {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, static_cast<int>(kRanks));
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<SilentBackend>());
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName(kGroupName);
  c10d::register_process_group(kGroupName, group);
  return ulysses::Group(group);
}

// [B, h, S, D] in the memory order that torch's kernel leaves: [B, S, h, D].
at::Tensor result_like(const at::Tensor& heads) {
  return at::empty({heads.size(0), heads.size(2), heads.size(1), heads.size(3)}, heads.options()).transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> no_attention(const at::Tensor& q, const at::Tensor&, const at::Tensor&, double, bool,
                                                const std::optional<at::Tensor>&, std::optional<double>) {
  ++kernel_calls;
  return {result_like(q), at::empty({q.size(0), q.size(1), q.size(2)}, q.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> no_attention_backward(const at::Tensor&, const at::Tensor& q,
                                                                     const at::Tensor& k, const at::Tensor& v,
                                                                     const at::Tensor&, const at::Tensor&, double, bool,
                                                                     const std::optional<at::Tensor>&,
                                                                     std::optional<double>) {
  ++kernel_calls;
  return {result_like(q), result_like(k), result_like(v)};
}

// In place of torch's kernel, in this program alone.
TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_scaled_dot_product_flash_attention_for_cpu", &no_attention);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &no_attention_backward);
}

struct Inputs {
  at::Tensor q, k, v, grad_out;
};

Inputs inputs(bool requires_grad) {
  const auto ones = [&] { return at::ones({1, 8, 4, 8}).requires_grad_(requires_grad); };
  return {ones(), ones(), ones(), at::ones({1, 8, 4, 8})};
}

// The arguments of a plain call by the schema's own names, so that an op that learns more options is called as plainly.
std::vector<c10::IValue> op_arguments(const c10::FunctionSchema& schema, const Inputs& x) {
  std::vector<c10::IValue> stack;
  for (const c10::Argument& argument : schema.arguments()) {
    const std::string& name = argument.name();
    const auto kind = argument.type()->kind();
    if (name == "q" || name == "k" || name == "v") {
      stack.emplace_back(name == "q" ? x.q : name == "k" ? x.k : x.v);
    } else if (name == "group_name") {
      stack.emplace_back(kGroupName);
    } else if (name == "cp_size") {
      stack.emplace_back(kRanks);
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else if (kind == c10::TypeKind::OptionalType) {
      stack.emplace_back();
    } else if (kind == c10::TypeKind::ListType) {
      stack.emplace_back(std::vector<int64_t>{});
    } else if (kind == c10::TypeKind::StringType) {
      stack.emplace_back("");
    } else if (kind == c10::TypeKind::BoolType) {
      stack.emplace_back(false);
    } else {
      stack.emplace_back(int64_t{0});
    }
  }
  return stack;
}

using Call = std::function<at::Tensor()>;

void run(const Call& call, const Inputs& x, int64_t times) {
  for (int64_t i = 0; i < times; ++i) {
    const at::Tensor out = call();
    if (out.requires_grad()) torch::autograd::grad({out}, {x.q, x.k, x.v}, {x.grad_out});
  }
}

void measure(const std::string& name, const std::function<Call(const Inputs&)>& make_call, bool backward,
             int64_t times) {
  const Inputs x = inputs(backward);
  const Call call = make_call(x);
  run(call, x, 3);  // the ranks agree, caches fill
  const int64_t before = kernel_calls;
  // Callgrind reads a dump's name only after the request, so the names must live longer.
  const std::string once = name + ' ' + std::to_string(times);
  const std::string twice = name + ' ' + std::to_string(2 * times);
  CALLGRIND_ZERO_STATS;
  run(call, x, times);
  CALLGRIND_DUMP_STATS_AT(once.c_str());
  run(call, x, 2 * times);
  CALLGRIND_DUMP_STATS_AT(twice.c_str());
  if (kernel_calls - before != 3 * times * (backward ? 2 : 1))
    throw std::runtime_error(name + " runs another kernel than the one that this program has replaced");
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t times = argc > 1 ? std::stoll(argv[1]) : 100;
  at::set_num_threads(1);
  std::cout << "torch " << TORCH_VERSION << ", compiler " << __VERSION__ << '\n';
  const ulysses::Group group = silent_group();
  const auto cpp = [&](const Inputs& x) -> Call {
    return [&] { return ulysses::ulysses_attention(x.q, x.k, x.v, group).out; };
  };
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ulysses::attention", "");
  const auto through_dispatcher = [&](const Inputs& x) -> Call {
    return [&, arguments = op_arguments(op.schema(), x)] {
      std::vector<c10::IValue> stack = arguments;
      op.callBoxed(stack);
      return stack[0].toTensor();
    };
  };
  measure("cpp_forward", cpp, /*backward=*/false, times);
  measure("cpp_forward_backward", cpp, /*backward=*/true, times);
  measure("op_forward", through_dispatcher, /*backward=*/false, times);
  measure("op_forward_backward", through_dispatcher, /*backward=*/true, times);
}
