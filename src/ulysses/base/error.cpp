#include "ulysses/base/error.h"

#include <utility>

#include "ulysses/base/text.h"

namespace ulysses::base {
namespace {

// Ends a sentence with exactly one period: texts received from elsewhere may bring their own.
void append_sentence(std::string& text, std::string_view sentence) {
  if (sentence.empty()) return;
  if (!text.empty()) text += ' ';
  text += sentence;
  if (text.back() != '.') text += '.';
}

}  // namespace

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "invalid_argument";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kRankMismatch:
      return "rank_mismatch";
    case ErrorKind::kCommunication:
      return "communication";
    case ErrorKind::kInternal:
      break;
  }
  return "internal";
}

std::string format(const Problem& problem, std::string_view op, int64_t cp_rank, int64_t cp_size) {
  std::string text;
  if (!op.empty()) text = cat('[', op, ']');
  std::string what = problem.what;
  if (cp_rank >= 0) what += cat(" (rank ", cp_rank, " of cp_size ", cp_size, ')');
  append_sentence(text, what);
  append_sentence(text, problem.rule);
  if (!problem.fix.empty()) append_sentence(text, cat("Fix: ", problem.fix));
  if (!problem.id.empty()) text += cat(" [", problem.id, ']');
  return text;
}

Error::Error(std::vector<Problem> problems, std::string_view op, int64_t cp_rank, int64_t cp_size)
    : id_(problems.empty() ? "" : problems.front().id),
      kind_(problems.empty() ? ErrorKind::kInternal : problems.front().kind) {
  std::vector<std::string> lines;
  lines.reserve(problems.size());
  for (const Problem& problem : problems) lines.push_back(format(problem, op, cp_rank, cp_size));
  message_ = join(lines, "\n");
}

void raise_if_any(std::vector<Problem> problems, std::string_view op, int64_t cp_rank, int64_t cp_size) {
  if (!problems.empty()) throw Error(std::move(problems), op, cp_rank, cp_size);
}

}  // namespace ulysses::base
