#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "ulysses/transports/collective/contribution.h"

namespace ulysses::transports {

// A collective while one rank puts it together out of tensors. What is wrong with them becomes `own.problem`; after
// that nothing is added. Tensors: strided, on the CPU, any dtype, one dtype a call. What peers read or write is
// contiguous memory: a tensor that is not is copied, and copied back by deliver().
class Call {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Splits = std::vector<int64_t>;

  Call(std::string_view op, int64_t rank, int64_t size) : own(op, size), rank_(rank) {}

  bool ok() const { return own.problem.empty(); }
  bool expect_count(const char* what, size_t count, size_t expected);
  void name_root(int64_t root);
  void reduce_with(int64_t op);

  // The contiguous memory that stands for a tensor; of outputs only update() has the values.
  at::Tensor input(const at::Tensor& tensor);
  at::Tensor output(const at::Tensor& tensor);
  at::Tensor update(const at::Tensor& tensor);
  // An output of a reduction is written while peers still read the inputs: one that lies inside them gets memory of
  // its own.
  at::Tensor output_beside(const at::Tensor& tensor, const Tensors& inputs);

  void send(int64_t peer, const at::Tensor& tensor);
  void send_to_all(const at::Tensor& tensor);
  void receive(int64_t peer, const at::Tensor& tensor);
  void expect_size(int64_t peer, const at::Tensor& tensor);
  // Cuts `rows` rows into one block per rank; no splits: equal ones.
  void send_cut(const at::Tensor& tensor, int64_t rows, const Splits& splits);
  void receive_cut(const at::Tensor& tensor, int64_t rows, const Splits& splits);

  // A peer would read what this rank has already overwritten.
  void refuse_overlap();
  // After the exchange: copies what was received for tensors that are not contiguous.
  void deliver() const;

  Contribution own;

 private:
  bool accept(const at::Tensor& tensor);
  at::Tensor stage(const at::Tensor& tensor, bool with_values);

  const int64_t rank_;
  std::vector<std::pair<at::Tensor, at::Tensor>> staged_;  // (tensor of the caller, contiguous memory)
};

// Empty if a transport of ours can move this tensor.
std::string find_tensor_problem(const at::Tensor& tensor);
bool is_plain(const at::Tensor& tensor);                    // its memory is its values, in order
at::Tensor plain_copy_if_needed(const at::Tensor& tensor);  // itself where it is plain
void copy_values(const at::Tensor& to, const at::Tensor& from);

}  // namespace ulysses::transports
