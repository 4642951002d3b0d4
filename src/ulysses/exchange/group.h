#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace ulysses::exchange {

// Our vocabulary over one c10d::ProcessGroup; the only place that knows torch's version differences. A light value.
// Every method but the accessors is a collective: every rank of the group must call it. Errors: CP062.
class Group {
 public:
  explicit Group(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);  // CP063 for a null pointer
  Group(const Group&);
  Group& operator=(const Group&);
  ~Group();
  static Group resolve(const std::string& group_name);  // CP063 if no such group is registered

  int64_t rank() const;
  int64_t size() const;
  std::string name() const;
  // True where comparing fingerprints on every call costs next to nothing: ranks that are threads or share memory, or a
  // group of one.
  bool agreement_is_free() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const { return process_group_; }

  // One all-to-all. `send` and `recv` are 1-D and contiguous; counts are elements per rank.
  void rows_to_ranks(at::Tensor& recv, const at::Tensor& send, std::vector<int64_t> recv_counts,
                     std::vector<int64_t> send_counts) const;
  // One collective: every rank's `local` (1-D, contiguous, counts[rank()] elements) side by side in rank order.
  // Uneven counts on every transport; W − 1 payloads a rank. Where the transport takes uneven counts only in one buffer
  // (Gloo), `local` is repeated W times in memory for the call.
  void gather_rows(at::Tensor& recv, const at::Tensor& local, const std::vector<int64_t>& counts) const;
  // Equal-size gather of small host data: [size(), n] of int64.
  std::vector<std::vector<int64_t>> gather_numbers(const std::vector<int64_t>& local) const;
  std::vector<std::string> gather_texts(const std::string& local) const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

}  // namespace ulysses::exchange
