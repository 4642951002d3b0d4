#pragma once

#include "ulysses/processors/attention_processor.h"

namespace ulysses::processors {

// The built-in backend "ulysses": attends with a kernel of the registry, chosen by name or by "auto".
class KernelProcessor final : public UlyssesAttentionProcessor {
 public:
  std::vector<std::string> supports() const override;
  std::vector<base::Problem> refusals(const contract::AttentionSpec& spec, bool backward) const override;

 protected:
  kernels::KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttendCall& call) override;
};

// The one instance that the ops use; registered as "ulysses".
KernelProcessor& kernel_processor();

// Gradients of one call of attend() with the kernel that the forward used; math for that of lse or of a mask.
// grad.lse may be undefined: none.
kernels::KernelGrads kernel_backward(const kernels::KernelOutput& grad, const strategy::Qkv& qkv,
                                     const kernels::KernelOutput& output, const AttendCall& call, bool mask_needs_grad);

}  // namespace ulysses::processors
