#include "ulysses/contract/options_text.h"

#include <charconv>
#include <functional>
#include <map>
#include <string>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/contract/rules.h"

namespace ulysses::contract {
namespace {

constexpr std::string_view kOp = "ulysses_attention";

// Layout facts that wait for the lengths, which travel apart.
struct ParsedOptions {
  AttentionOptions options;
  LayoutSpec layout, kv_layout;
};

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

int64_t to_int64(const std::string& value) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size()) throw base::Error({not_64_bit(value)}, kOp);
  return number;
}

using Setter = std::function<void(ParsedOptions&, const std::string&)>;

Setter text_field(std::string AttentionOptions::*field) {
  return [field](ParsedOptions& parsed, const std::string& value) { parsed.options.*field = value; };
}

template <typename Field>
Setter policy_field(Field UlyssesContextParallelPolicy::*field) {
  return [field](ParsedOptions& parsed, const std::string& value) {
    if constexpr (std::is_same_v<Field, std::string>) {
      parsed.options.policy.*field = value;
    } else if constexpr (std::is_same_v<Field, std::vector<std::string>>) {
      parsed.options.policy.*field = split(value, ',');
    } else if constexpr (std::is_same_v<Field, bool>) {
      parsed.options.policy.*field = value == "1";
    } else {
      parsed.options.policy.*field = to_int64(value);
    }
  };
}

void add_requested(ParsedOptions& parsed, const std::string& value) {
  for (const std::string& name : split(value, ','))
    if (const auto feature = feature_from_string(name)) parsed.options.requested.push_back(*feature);
}

const std::map<std::string, Setter, std::less<>>& setters() {
  using Policy = UlyssesContextParallelPolicy;
  static const std::map<std::string, Setter, std::less<>> table = {
      {"strategy", text_field(&AttentionOptions::strategy)},
      {"kernel", text_field(&AttentionOptions::kernel)},
      {"agreement", text_field(&AttentionOptions::agreement)},
      {"qkv_format", text_field(&AttentionOptions::qkv_format)},
      {"kv_role", text_field(&AttentionOptions::kv_role)},
      {"causal_alignment", text_field(&AttentionOptions::causal_alignment)},
      {"outer", text_field(&AttentionOptions::outer)},
      {"softcap", [](ParsedOptions& p, const std::string& v) { p.options.softcap = std::strtod(v.c_str(), nullptr); }},
      {"mask_q", text_field(&AttentionOptions::mask_q)},
      {"mask_kv", text_field(&AttentionOptions::mask_kv)},
      {"mask_type", text_field(&AttentionOptions::mask_type)},
      {"sinks_type", text_field(&AttentionOptions::sinks_type)},
      {"joint_len", [](ParsedOptions& p, const std::string& v) { p.options.joint_len = to_int64(v); }},
      {"joint_position", text_field(&AttentionOptions::joint_position)},
      {"joint_valid_lens",
       [](ParsedOptions& p, const std::string& v) {
         for (const std::string& len : split(v, ',')) p.options.joint_valid_lens.push_back(to_int64(len));
       }},
      {"joint_problem", text_field(&AttentionOptions::joint_problem)},
      {"cp_size", [](ParsedOptions& p, const std::string& v) { p.options.requested_cp_size = to_int64(v); }},
      {"cp_rank", [](ParsedOptions& p, const std::string& v) { p.layout.cp_rank = to_int64(v); }},
      {"kv_cp_rank", [](ParsedOptions& p, const std::string& v) { p.kv_layout.cp_rank = to_int64(v); }},
      {"order", [](ParsedOptions& p, const std::string& v) { p.layout.order = p.kv_layout.order = v; }},
      {"requested", add_requested},
      {"policy.backend_name", policy_field(&Policy::backend_name)},
      {"policy.require_seq_divisible", policy_field(&Policy::require_seq_divisible)},
      {"policy.auto_pad", policy_field(&Policy::auto_pad)},
      {"policy.pad_multiple", policy_field(&Policy::pad_multiple)},
      {"policy.kv_must_be_global", policy_field(&Policy::kv_must_be_global)},
      {"policy.output_restore_dim", policy_field(&Policy::output_restore_dim)},
      {"policy.base_processor", policy_field(&Policy::base_processor)},
      {"policy.required_checks", policy_field(&Policy::required_checks)},
  };
  return table;
}

ParsedOptions parse(std::string_view text) {
  ParsedOptions parsed;
  for (const std::string& line : split(text, '\n')) {
    const size_t equals = std::min(line.find('='), line.size());
    const auto setter = setters().find(std::string_view(line).substr(0, equals));
    if (setter == setters().end())
      throw base::Error(
          {{"CP099", base::ErrorKind::kInternal, base::cat("unknown option line \"", line, '"'),
            "The Python and the C++ part of this library do not fit each other", "install both from one source"}},
          kOp);
    setter->second(parsed, equals < line.size() ? line.substr(equals + 1) : "");
  }
  return parsed;
}

}  // namespace

AttentionOptions options_from_text(std::string_view text) {
  ParsedOptions parsed = parse(text);
  parsed.options.layout = parsed.layout;
  parsed.options.kv_layout = parsed.kv_layout;
  return parsed.options;
}

UlyssesContextParallelPolicy policy_from_text(std::string_view text) { return parse(text).options.policy; }

}  // namespace ulysses::contract
