#include "ulysses/bindings/ops_call.h"

#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <shared_mutex>

#include "ulysses/base/error.h"
#include "ulysses/contract/options_text.h"

namespace ulysses::bindings {
namespace {

// Parsed once per distinct text: programs use a handful of option sets and call with them millions of times.
contract::AttentionOptions parsed_options(std::string_view config) {
  static std::shared_mutex mutex;
  static std::map<std::string, contract::AttentionOptions, std::less<>> cache;
  {
    const std::shared_lock<std::shared_mutex> lock(mutex);
    if (const auto found = cache.find(config); found != cache.end()) return found->second;
  }
  contract::AttentionOptions options = contract::options_from_text(config);
  const std::unique_lock<std::shared_mutex> lock(mutex);
  return cache.emplace(std::string(config), std::move(options)).first->second;
}

void fill(std::optional<contract::LayoutSpec>& layout, c10::SymIntArrayRef lengths, c10::SymIntArrayRef padded) {
  if (lengths.empty()) {
    layout.reset();
    return;
  }
  layout->lengths = C10_AS_INTARRAYREF_SLOW(lengths).vec();
  layout->padded_lengths = C10_AS_INTARRAYREF_SLOW(padded).vec();
}

}  // namespace

contract::AttentionOptions OpCall::options() const {
  contract::AttentionOptions options = parsed_options(config);
  fill(options.layout, lengths, padded_lengths);
  fill(options.kv_layout, kv_lengths, kv_padded_lengths);
  options.is_causal = is_causal;
  options.softmax_scale = softmax_scale;
  options.return_lse = return_lse;
  return options;
}

OpCall op_call(const std::vector<int64_t>& lengths, const std::vector<int64_t>& padded_lengths,
               const std::vector<int64_t>& kv_lengths, const std::vector<int64_t>& kv_padded_lengths, bool is_causal,
               std::optional<double> softmax_scale, bool return_lse, std::string_view config) {
  OpCall call;
  call.lengths = c10::fromIntArrayRefSlow(lengths);
  call.padded_lengths = c10::fromIntArrayRefSlow(padded_lengths);
  call.kv_lengths = c10::fromIntArrayRefSlow(kv_lengths);
  call.kv_padded_lengths = c10::fromIntArrayRefSlow(kv_padded_lengths);
  call.is_causal = is_causal;
  call.softmax_scale = softmax_scale;
  call.return_lse = return_lse;
  call.config = config;
  return call;
}

void translate_errors(const std::function<void()>& body) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  try {
    body();
  } catch (const base::Error& error) {
    switch (error.kind()) {
      case base::ErrorKind::kInvalidArgument:
        throw c10::ValueError(here, error.what());
      case base::ErrorKind::kUnsupported:
        throw c10::NotImplementedError(here, error.what());
      default:
        throw c10::Error(here, error.what());
    }
  }
}

}  // namespace ulysses::bindings
