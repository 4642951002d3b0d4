#include "ulysses/exchange/group.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string_view>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/exchange/failure_census.h"

namespace ulysses::exchange {
namespace {

using c10d::ProcessGroup;
using Splits = std::vector<int64_t>;

// Backends in which a collective of a few bytes costs microseconds.
constexpr std::array<std::string_view, 2> kBackendsWithFreeAgreement = {"ulysses_threads", "ulysses_shm"};

// Backends whose list form of all-to-all takes outputs of different sizes. Gloo's refuses them ("invalid tensor size at
// index 1"); every backend takes them in the single-tensor form with splits.
constexpr std::array<std::string_view, 3> kBackendsWithUnevenLists = {"ulysses_threads", "ulysses_shm", "nccl"};

// Note [Two names]: torch 2.13 renamed the single-tensor collectives of ProcessGroup and deprecated the old names;
// older versions have only those.
template <typename PG>
auto all_to_all(PG& group, at::Tensor& recv, at::Tensor& send, Splits& recv_counts, Splits& send_counts) {
  if constexpr (requires { group.all_to_all_single(recv, send, recv_counts, send_counts); }) {
    return group.all_to_all_single(recv, send, recv_counts, send_counts);
  } else {
    return group.alltoall_base(recv, send, recv_counts, send_counts);
  }
}

template <typename PG>
auto all_gather(PG& group, at::Tensor& recv, at::Tensor& send) {
  if constexpr (requires { group.all_gather_single(recv, send); }) {
    return group.all_gather_single(recv, send);
  } else {
    return group._allgather_base(recv, send);
  }
}

// Runs one collective to its end. Our own errors say what they mean; torch's are wrapped, and after one nobody knows
// how far the other ranks came: those that failed too say so in the group's store.
template <typename Collective>
void run(const ProcessGroup& group, std::string_view op, Collective collective) {
  std::string reason;
  try {
    collective();
    return;
  } catch (const base::Error&) {
    throw;
  } catch (const c10::Error& error) {
    reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  std::string others = failure_census(group, op);
  if (!others.empty()) others += ". ";
  throw base::Error(
      {{"CP062", base::ErrorKind::kCommunication, base::cat("torch.distributed failed in ", op, ": ", reason),
        others + "The ranks may have stopped at different points, so the group is no longer usable",
        "check that every rank is alive and makes the same calls, then create the group again"}},
      op, group.getRank(), group.getSize());
}

// A process group knows nothing of autograd and would drop the gradient without a word.
at::Tensor without_grad(const at::Tensor& tensor) { return tensor.requires_grad() ? tensor.detach() : tensor; }

template <size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Where small host data must live for this group to carry it.
at::Device host_data_device(ProcessGroup& group) {
  if (group.hasBackendForDeviceType(c10::DeviceType::CPU)) return at::kCPU;
  const auto bound = group.getBoundDeviceId();
  if (bound) return *bound;
  const auto devices = group.getDeviceTypes();
  return devices.empty() ? at::Device(at::kCPU) : devices.front();
}

// [W, n] on the CPU from n host values per rank.
at::Tensor gather_host_data(ProcessGroup& group, std::string_view op, const at::Tensor& local) {
  if (group.getSize() == 1) return local.unsqueeze(0);
  const auto device = host_data_device(group);
  at::Tensor send = local.to(device);
  at::Tensor recv = at::empty({group.getSize() * local.numel()}, send.options());
  run(group, op, [&] { all_gather(group, recv, send)->wait(); });
  return recv.cpu().view({group.getSize(), local.numel()});
}

}  // namespace

Group::Group(const Group&) = default;
Group& Group::operator=(const Group&) = default;
Group::~Group() = default;

Group::Group(const c10::intrusive_ptr<ProcessGroup>& process_group) : process_group_(process_group) {
  if (process_group_ == nullptr) {
    throw base::Error({{"CP063", base::ErrorKind::kInvalidArgument, "the process group is null", "",
                        "pass a group from torch.distributed or ThreadWorld::group"}},
                      "Group");
  }
}

Group Group::resolve(const std::string& group_name) {
  c10::intrusive_ptr<ProcessGroup> found;
  try {
    found = c10d::resolve_process_group(group_name);
  } catch (const std::exception&) {  // torch's text names its registry; ours says what to do
  }
  if (found == nullptr) {
    throw base::Error({{"CP063", base::ErrorKind::kInvalidArgument,
                        base::cat("no process group is registered as \"", group_name, '"'), "",
                        "pass the group_name of a group that is alive in this process"}},
                      "Group::resolve");
  }
  return Group(found);
}

int64_t Group::rank() const { return process_group_->getRank(); }
int64_t Group::size() const { return process_group_->getSize(); }
std::string Group::name() const { return process_group_->getGroupName(); }

bool Group::agreement_is_free() const {
  if (size() == 1) return true;
  if (!process_group_->hasBackendForDeviceType(c10::DeviceType::CPU)) return false;
  return is_one_of(kBackendsWithFreeAgreement, process_group_->getBackend(c10::DeviceType::CPU)->getBackendName());
}

void Group::rows_to_ranks(at::Tensor& recv, const at::Tensor& send, std::vector<int64_t> recv_counts,
                          std::vector<int64_t> send_counts) const {
  at::Tensor output = without_grad(recv);
  at::Tensor input = without_grad(send);
  run(*process_group_, "rows_to_ranks", [&] {
    if (size() == 1) {
      output.copy_(input);
    } else {
      all_to_all(*process_group_, output, input, recv_counts, send_counts)->wait();
    }
  });
}

void Group::gather_rows(at::Tensor& recv, const at::Tensor& local, const std::vector<int64_t>& counts) const {
  at::Tensor output = without_grad(recv);
  at::Tensor input = without_grad(local);
  run(*process_group_, "gather_rows", [&] {
    if (size() == 1) {
      output.copy_(input);
      return;
    }
    // Gloo kills the process on a size that the peers don't expect.
    TORCH_CHECK(input.numel() == counts.at(static_cast<size_t>(rank())), "local has ", input.numel(),
                " elements, counts [", base::join(counts), "]");
    // An all-to-all in which every rank gets the same: unlike all-gather it takes uneven shards.
    const bool even = std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
    const std::string backend = process_group_->getBackend(output.device().type())->getBackendName();
    if (even || is_one_of(kBackendsWithUnevenLists, backend)) {
      std::vector<at::Tensor> outputs = output.split_with_sizes(counts);
      std::vector<at::Tensor> inputs(counts.size(), input);
      process_group_->alltoall(outputs, inputs)->wait();
    } else {
      at::Tensor repeated = input.repeat({size()});
      Splits send_counts(counts.size(), input.numel());
      Splits recv_counts(counts);
      all_to_all(*process_group_, output, repeated, recv_counts, send_counts)->wait();
    }
  });
}

std::vector<std::vector<int64_t>> Group::gather_numbers(const std::vector<int64_t>& local) const {
  const auto width = static_cast<int64_t>(local.size());
  at::Tensor mine = at::empty({width}, at::kLong);
  std::copy(local.begin(), local.end(), mine.mutable_data_ptr<int64_t>());
  const at::Tensor all = gather_host_data(*process_group_, "gather_numbers", mine);
  std::vector<std::vector<int64_t>> numbers;
  for (int64_t peer = 0; peer < size(); ++peer) {
    const auto* begin = all.const_data_ptr<int64_t>() + peer * width;
    numbers.emplace_back(begin, begin + width);
  }
  return numbers;
}

std::vector<std::string> Group::gather_texts(const std::string& local) const {
  const auto lengths = gather_numbers({static_cast<int64_t>(local.size())});
  int64_t longest = 0;
  for (const auto& length : lengths) longest = std::max(longest, length[0]);
  std::vector<std::string> texts(lengths.size());
  if (longest == 0) return texts;
  at::Tensor mine = at::zeros({longest}, at::kByte);
  std::copy(local.begin(), local.end(), mine.mutable_data_ptr<uint8_t>());
  const at::Tensor all = gather_host_data(*process_group_, "gather_texts", mine);
  const auto* bytes = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
  for (size_t peer = 0; peer < texts.size(); ++peer) {
    texts[peer].assign(bytes + static_cast<int64_t>(peer) * longest, static_cast<size_t>(lengths[peer][0]));
  }
  return texts;
}

}  // namespace ulysses::exchange
