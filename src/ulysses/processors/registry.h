#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ulysses/processors/attention_processor.h"

namespace ulysses::processors {

// Backends by the name that policy.backend_name selects. "ulysses" is built in. Thread-safe.
// Registering a name again replaces the backend.
void register_backend(const std::string& name, std::shared_ptr<UlyssesAttentionProcessor> backend);
void unregister_backend(const std::string& name);

std::vector<std::string> backend_names();                                          // sorted
std::shared_ptr<UlyssesAttentionProcessor> find_backend(const std::string& name);  // nullptr if unknown

// The backend of a policy; for an unknown name the built-in one, whose validation then refuses it (CP001).
std::shared_ptr<UlyssesAttentionProcessor> backend_of(const contract::UlyssesContextParallelPolicy& policy);

}  // namespace ulysses::processors
