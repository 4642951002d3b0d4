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

// Gradients of one uniform head run with the kernel that the forward used.
kernels::KernelGrads kernel_backward(const at::Tensor& grad_out, const strategy::Qkv& qkv,
                                     const kernels::KernelOutput& output, const AttendCall& call);

}  // namespace ulysses::processors
