#include "ulysses/doctor/messages.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>

namespace ulysses::doctor {
namespace {

using Words = std::vector<std::string_view>;

// Words that name what this case asks for beyond plain attention.
Words asked_words(const Case& c) {
  Words words;
  const auto add = [&](bool asked, const Words& names) {
    if (asked) words.insert(words.end(), names.begin(), names.end());
  };
  add(c.is_causal, {"causal"});
  add(c.num_kv_heads != c.num_heads, {"gqa", "grouped", "kv head", "kv_head", "multi-query", "key_value"});
  add(c.is_padded(), {"layout", "pad"});
  add(!c.has_even_shards(), {"uneven", "layout", "unequal"});
  add(c.kv_lengths != c.lengths, {"kv_layout", "cross"});
  add(c.softmax_scale != 0, {"scale"});
  add(c.return_lse, {"lse", "logsumexp"});
  add(c.window != 0, {"window"});
  add(!c.mask.empty(), {"mask"});
  add(c.sinks, {"sink"});
  add(c.softcap != 0, {"softcap", "cap"});
  add(c.lse_grad, {"gradient", "differentiable"});
  add(c.text_len != 0, {"joint", "text"});
  add(c.num_documents != 1, {"cu_seqlens", "packed", "varlen"});
  add(c.dropout_p != 0, {"dropout"});
  add(c.replicated_kv, {"replicated", "kv_role"});
  add(c.qkv_format != "bshd", {"format", "bhsd", "sbhd"});
  add(c.order != "contiguous", {"order", "head_tail"});
  add(c.ulysses_degree != 0, {"degree", "mesh"});
  add(c.dtype == "float64", {"float64", "double"});
  add(c.dtype == "float16", {"float16", "half"});
  add(c.dtype == "bfloat16", {"bfloat16"});
  return words;
}

std::set<std::string> numbers_of(const Case& c) {
  std::set<std::string> numbers;
  for (const int64_t number :
       {c.cp_size, c.batch, c.num_heads, c.num_kv_heads, c.head_dim, c.value_head_dim, c.seq_len(), c.kv_seq_len()})
    numbers.insert(std::to_string(number));
  for (const auto& lengths : {c.lengths, c.padded_lengths, c.kv_lengths})
    for (const int64_t length : lengths) numbers.insert(std::to_string(length));
  return numbers;
}

// The text in lower case as " word word word ", so that a word is found at its beginning: "head" in "num_heads", and
// not "text" in "context".
std::string words_of(const std::string& message) {
  std::string words = " ";
  for (const char letter : message) {
    const auto byte = static_cast<unsigned char>(letter);
    words += std::isalnum(byte) != 0 ? static_cast<char>(std::tolower(byte)) : ' ';
  }
  return words;
}

// Whether a word of the text is one of the case's numbers. The digits of an address ("0x7f32…") are none.
bool names_a_number(const Case& c, const std::string& words) {
  const std::set<std::string> numbers = numbers_of(c);
  return std::any_of(numbers.begin(), numbers.end(),
                     [&](const std::string& number) { return words.find(" " + number + " ") != std::string::npos; });
}

}  // namespace

bool is_clear_message(const Case& c, const std::string& message) {
  if (message.find("[CP0") != std::string::npos) return true;
  const std::string text = words_of(message) + " ";
  const auto names_any = [&](const Words& words) {
    return std::any_of(words.begin(), words.end(), [&](std::string_view word) {
      return text.find(words_of(std::string(word))) != std::string::npos;
    });
  };
  if (names_any(asked_words(c))) return true;
  // Autograd's own errors speak of backward and gradients too, and refuse nothing.
  if (c.backward && names_any({"backward", "gradient"}) &&
      names_any({"notimplemented", "not implemented", "not supported", "unsupported", "no backward", "not offered",
                 "does not support", "forward only"}))
    return true;
  return names_any({"head", "seq", "token", "length", "shard", "rank", "world", "divi", "degree"}) &&
         names_a_number(c, text);
}

}  // namespace ulysses::doctor
