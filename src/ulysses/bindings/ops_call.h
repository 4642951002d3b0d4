#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ulysses/contract/attention_spec.h"
#include "ulysses/strategy/plan.h"

namespace ulysses::bindings {

// The arguments that every attention op shares, as its schema lists them:
//   str group_name, int cp_size, int cp_rank, SymInt[] lengths, SymInt[] padded_lengths, SymInt[] kv_lengths,
//   SymInt[] kv_padded_lengths, bool is_causal, float? softmax_scale, bool return_lse, str config
// Empty lengths mean: no layout. cp_size and cp_rank are arguments so that tracing needs no live group.
struct OpCall {
  std::string_view group_name;
  int64_t cp_size = 1;
  int64_t cp_rank = 0;
  c10::SymIntArrayRef lengths, padded_lengths, kv_lengths, kv_padded_lengths;
  bool is_causal = false;
  std::optional<double> softmax_scale;
  bool return_lse = false;
  std::string_view config;  // contract/options_text.h

  contract::AttentionOptions options() const;
};

// A call from the arguments of Python's Request, in its order; the lists must outlive it.
OpCall op_call(const std::vector<int64_t>& lengths, const std::vector<int64_t>& padded_lengths,
               const std::vector<int64_t>& kv_lengths, const std::vector<int64_t>& kv_padded_lengths, bool is_causal,
               std::optional<double> softmax_scale, bool return_lse, std::string_view config);

// Runs body and rethrows our errors as the c10 errors that Python sees as ValueError, NotImplementedError,
// RuntimeError.
void translate_errors(const std::function<void()>& body);

}  // namespace ulysses::bindings
