// gather_sequence, the differentiable end of a sharded sequence, and sum_grad, the beginning of a replicated one.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ulysses/bindings/ops.h"
#include "ulysses/bindings/ops_call.h"
#include "ulysses/exchange/group.h"
#include "ulysses/exchange/token_gather.h"
#include "ulysses/processors/differentiable.h"

namespace ulysses::bindings {
namespace {

using exchange::GatherGrad;
using exchange::Group;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor gather_sequence(const at::Tensor& x_local, std::string_view group_name, int64_t, c10::SymIntArrayRef lengths,
                           int64_t dim, std::string_view) {
  at::Tensor result;
  translate_errors([&] {
    result = exchange::gather_sequence(x_local, C10_AS_INTARRAYREF_SLOW(lengths).vec(), dim,
                                       Group::resolve(std::string(group_name)));
  });
  return result;
}

at::Tensor gather_sequence_backward(const at::Tensor& grad_gathered, c10::SymInt rows, std::string_view group_name,
                                    int64_t, c10::SymIntArrayRef lengths, int64_t dim, std::string_view grad) {
  at::Tensor result;
  translate_errors([&] {
    result = exchange::gather_sequence_backward(
        grad_gathered, C10_AS_INTARRAYREF_SLOW(lengths).vec(), rows.guard_int(__FILE__, __LINE__), dim,
        grad == "sum" ? GatherGrad::kSum : GatherGrad::kSlice, Group::resolve(std::string(group_name)));
  });
  return result;
}

at::Tensor with_size(const at::Tensor& like, int64_t dim, const c10::SymInt& size) {
  std::vector<c10::SymInt> sizes = like.sym_sizes().vec();
  sizes[static_cast<size_t>(dim)] = size;
  return at::empty_symint(sizes, like.options().requires_grad(false));
}

at::Tensor gather_sequence_meta(const at::Tensor& x_local, std::string_view, int64_t, c10::SymIntArrayRef lengths,
                                int64_t dim, std::string_view) {
  c10::SymInt total = 0;
  for (const c10::SymInt& length : lengths) total = total + length;
  return with_size(x_local, dim, total);
}

at::Tensor gather_sequence_backward_meta(const at::Tensor& grad_gathered, c10::SymInt rows, std::string_view, int64_t,
                                         c10::SymIntArrayRef, int64_t dim, std::string_view) {
  return with_size(grad_gathered, dim, rows);
}

struct GatherFunction : torch::autograd::Function<GatherFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_local, std::string_view group_name,
                            int64_t cp_rank, c10::SymIntArrayRef lengths, int64_t dim, std::string_view grad) {
    static const auto op = find_op<GatherSequence>("ulysses::gather_sequence");
    auto& data = context->saved_data;
    data["rows"] = x_local.sym_size(dim);
    data["group_name"] = std::string(group_name);
    data["cp_rank"] = cp_rank;
    data["lengths"] = lengths;
    data["dim"] = dim;
    data["grad"] = std::string(grad);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x_local, group_name, cp_rank, lengths, dim, grad);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find_op<GatherSequenceBackward>("ulysses::gather_sequence_backward");
    translate_errors([] { processors::refuse_second_derivative(); });
    auto& data = context->saved_data;
    const auto lengths = data["lengths"].toSymIntVector();
    return {op.call(grads[0], data["rows"].toSymInt(), data["group_name"].toStringRef(), data["cp_rank"].toInt(),
                    lengths, data["dim"].toInt(), data["grad"].toStringRef()),
            {},
            {},
            {},
            {},
            {}};
  }
};

at::Tensor gather_sequence_autograd(const at::Tensor& x_local, std::string_view group_name, int64_t cp_rank,
                                    c10::SymIntArrayRef lengths, int64_t dim, std::string_view grad) {
  return GatherFunction::apply(x_local, group_name, cp_rank, lengths, dim, grad);
}

at::Tensor sum_grad(const at::Tensor& x, std::string_view) { return x.clone(); }

at::Tensor sum_over_ranks(const at::Tensor& x, std::string_view group_name) {
  at::Tensor sum;
  translate_errors([&] { sum = exchange::sum_over_ranks(x, Group::resolve(std::string(group_name))); });
  return sum;
}

at::Tensor like(const at::Tensor& x, std::string_view) {
  return at::empty_symint(x.sym_sizes(), x.options().requires_grad(false));
}

struct SumGradFunction : torch::autograd::Function<SumGradFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::string_view group_name) {
    static const auto op = find_op<SumOverRanks>("ulysses::sum_grad");
    context->saved_data["group_name"] = std::string(group_name);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x, group_name);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find_op<SumOverRanks>("ulysses::sum_over_ranks");
    translate_errors([] { processors::refuse_second_derivative(); });
    return {op.call(grads[0], context->saved_data["group_name"].toStringRef()), {}};
  }
};

at::Tensor sum_grad_autograd(const at::Tensor& x, std::string_view group_name) {
  return SumGradFunction::apply(x, group_name);
}

void register_kernels(torch::Library& library) {
  library.impl("gather_sequence", gather_sequence);
  library.impl("gather_sequence_backward", gather_sequence_backward);
  library.impl("sum_grad", sum_grad);
  library.impl("sum_over_ranks", sum_over_ranks);
}

}  // namespace

TORCH_LIBRARY_IMPL(ulysses, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(ulysses, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(ulysses, Meta, library) {
  library.impl("gather_sequence", gather_sequence_meta);
  library.impl("gather_sequence_backward", gather_sequence_backward_meta);
  library.impl("sum_grad", like);
  library.impl("sum_over_ranks", like);
}
TORCH_LIBRARY_IMPL(ulysses, Autograd, library) {
  library.impl("gather_sequence", gather_sequence_autograd);
  library.impl("sum_grad", sum_grad_autograd);
}

}  // namespace ulysses::bindings
