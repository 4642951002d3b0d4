#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace ulysses::base {

// What went wrong, as the caller sees it. Python maps the kinds to ValueError, NotImplementedError and RuntimeError.
enum class ErrorKind {
  kInvalidArgument,  // the caller passed something that no version of this library accepts
  kUnsupported,      // valid, but this path cannot honour it; the fix names one that can
  kRankMismatch,     // the ranks of the group disagree; the group stays usable
  kCommunication,    // a rank failed, left or was too late; the message says whether the group stays usable
  kInternal,         // a bug of ours
};

std::string_view to_string(ErrorKind kind);

// One violated rule. `id` is an entry of contract/error_catalogue.h ("CP010").
struct Problem {
  std::string id;
  ErrorKind kind = ErrorKind::kInvalidArgument;
  std::string what;  // "seq_len=3001 is not divisible by cp_size=4"
  std::string rule;  // "Shards must be equal under this policy", may be empty
  std::string fix;   // "pad to 3008 (752 per rank), or require_seq_divisible=False"; numbers that work
};

// "seq_len=3001 is not divisible by cp_size=4. Shards must be equal … Fix: pad to 3008 …. [CP010]"
// With an op: "[op] …"; with a rank: "… (rank 1 of cp_size 4). …".
std::string format(const Problem& problem, std::string_view op = "", int64_t cp_rank = -1, int64_t cp_size = 0);

// Every failure of this library. Carries all violated rules, never only the first.
class Error : public std::exception {
 public:
  Error(std::vector<Problem> problems, std::string_view op, int64_t cp_rank = -1, int64_t cp_size = 0);

  const char* what() const noexcept override { return message_.c_str(); }
  const std::string& id() const { return id_; }  // id of the first problem
  ErrorKind kind() const { return kind_; }       // kind of the first problem

 private:
  std::string id_;
  ErrorKind kind_;
  std::string message_;
};

// Throws Error if there is any problem.
void raise_if_any(std::vector<Problem> problems, std::string_view op, int64_t cp_rank = -1, int64_t cp_size = 0);

}  // namespace ulysses::base
