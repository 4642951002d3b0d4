// merge_attention: local, so without a group, a Meta kernel or a backward of its own.
#include <torch/library.h>

#include "ulysses/bindings/ops.h"
#include "ulysses/bindings/ops_call.h"
#include "ulysses/kernels/merge_lse.h"

namespace ulysses::bindings {
namespace {

std::tuple<at::Tensor, at::Tensor> merge_attention(at::TensorList outs, at::TensorList lses) {
  kernels::KernelOutput merged;
  translate_errors([&] { merged = kernels::merge_attention(outs, lses); });
  return {merged.out, merged.lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(ulysses, CompositeImplicitAutograd, library) { library.impl("merge_attention", merge_attention); }

}  // namespace ulysses::bindings
