#include "ulysses/processors/registry.h"

#include <map>
#include <mutex>

#include "ulysses/processors/kernel_processor.h"

namespace ulysses::processors {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<UlyssesAttentionProcessor>> backends = {
      {"ulysses", std::shared_ptr<KernelProcessor>(&kernel_processor(), [](KernelProcessor*) {})}};
};

// Never destroyed: a backend may be a Python object, and the interpreter may be gone when statics are torn down.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

}  // namespace

void register_backend(const std::string& name, std::shared_ptr<UlyssesAttentionProcessor> backend) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().backends[name] = std::move(backend);
}

void unregister_backend(const std::string& name) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().backends.erase(name);
}

std::vector<std::string> backend_names() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, backend] : registry().backends) names.push_back(name);
  return names;
}

std::shared_ptr<UlyssesAttentionProcessor> find_backend(const std::string& name) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().backends.find(name);
  return found == registry().backends.end() ? nullptr : found->second;
}

std::shared_ptr<UlyssesAttentionProcessor> backend_of(const contract::UlyssesContextParallelPolicy& policy) {
  auto backend = find_backend(policy.backend_name);
  // An unknown name is refused by the contract with every other problem; until then any backend can carry the call.
  return backend ? backend : find_backend("ulysses");
}

}  // namespace ulysses::processors
