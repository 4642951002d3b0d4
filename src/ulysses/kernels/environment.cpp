#include "ulysses/kernels/environment.h"

#include <cstdlib>

#include "ulysses/base/text.h"
#include "ulysses/contract/rules.h"
#include "ulysses/kernels/cpu_flash/features.h"
#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {
namespace {

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

}  // namespace

std::string requested_kernel(std::string_view name) {
  const std::string_view wanted = variable("ULYSSES_KERNEL");
  return std::string(name != "auto" || wanted.empty() ? name : wanted);
}

std::vector<base::Problem> environment_problems() {
  std::vector<base::Problem> problems;
  const std::string_view kernel = variable("ULYSSES_KERNEL");
  if (!kernel.empty() && kernel != "auto" && find_kernel(kernel) == nullptr) {
    std::vector<std::string_view> known = {"auto"};
    for (const Kernel* each : all_kernels()) known.push_back(each->name());
    problems.push_back(contract::unknown_word("CP031", "ULYSSES_KERNEL", kernel, known));
  }
  std::string unknown;
  flash::admitted({}, variable("ULYSSES_CPU_FEATURES"), &unknown);
  if (!unknown.empty()) {
    std::vector<std::string_view> known = {"none"};
    for (const flash::NamedFeature& named : flash::kNamedFeatures) known.push_back(named.word);
    problems.push_back(contract::unknown_word("CP031", "ULYSSES_CPU_FEATURES", unknown, known));
  }
  return problems;
}

}  // namespace ulysses::kernels
