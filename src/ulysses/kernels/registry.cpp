#include <array>
#include <string>
#include <utility>
#include <vector>

#include "ulysses/base/text.h"
#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {

// On CUDA: flash first (GQA natively, 16-bit, the narrowest set of conditions that we can check), then efficient
// (float32, and head dims that flash refuses), then cuDNN, whose limits vary with the installed version in ways that
// no refusal here can see, so that "auto" reaches it last and a caller who wants it names it. On CPU: our own kernel
// where it is measured to be the faster, then torch's fused op.
// math last everywhere: it refuses nothing and holds the whole score matrix.
std::span<const Kernel* const> all_kernels() {
  static const std::array<const Kernel*, 6> kernels = {&cuda_flash_kernel(), &cuda_efficient_kernel(),
                                                       &cuda_cudnn_kernel(), &cpu_flash_kernel(),
                                                       &fused_cpu_kernel(),  &math_kernel()};
  return kernels;
}

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel* kernel : all_kernels()) {
    if (kernel->name() == name) return kernel;
  }
  return nullptr;
}

namespace {

std::string not_known(std::string_view name, std::span<const Kernel* const> kernels) {
  std::vector<std::string_view> names;
  for (const Kernel* kernel : kernels) names.push_back(kernel->name());
  return base::cat("no kernel is named ", name, "; known: auto, ", base::join(names));
}

std::string sentence(const std::vector<std::pair<std::string_view, std::string>>& reasons) {
  std::vector<std::string> texts;
  for (const auto& [kernel, reason] : reasons) texts.push_back(base::cat(kernel, " ", reason));
  return base::join(texts, "; ");
}

}  // namespace

const Kernel* select_kernel(std::string_view name, const KernelNeed& need, std::span<const Kernel* const> kernels,
                            std::string* why) {
  std::vector<std::pair<std::string_view, std::string>> reasons;  // put into words only where no kernel serves
  for (const Kernel* kernel : kernels) {
    if (name != "auto" && name != kernel->name()) continue;
    std::optional<std::string> refusal = kernel->refusal(need);
    if (!refusal && name == "auto") refusal = kernel->auto_refusal(need);
    if (!refusal) return kernel;
    reasons.emplace_back(kernel->name(), *std::move(refusal));
  }
  if (why != nullptr) *why = reasons.empty() ? not_known(name, kernels) : sentence(reasons);
  return nullptr;
}

}  // namespace ulysses::kernels
