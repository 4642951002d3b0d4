#include "ulysses/processors/attend_together.h"

#include <exception>
#include <utility>
#include <vector>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"

namespace ulysses::processors {
namespace {

// Never empty: an empty text says that a rank succeeded.
std::string reason_of(const std::exception_ptr& failure) {
  std::string reason;
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    reason = base::first_line(error.what());
  } catch (...) {
  }
  return reason.empty() ? "an exception without a text" : reason;
}

void raise_for_others(const std::vector<std::string>& reasons, const exchange::Group& group) {
  std::vector<base::Problem> problems;
  for (size_t rank = 0; rank < reasons.size(); ++rank) {
    if (reasons[rank].empty()) continue;
    problems.push_back({"CP067", base::ErrorKind::kRankMismatch,
                        base::cat("attend() failed on rank ", rank, ": ", reasons[rank]),
                        "A rank without a result would leave the others waiting for it; the group is still usable",
                        base::cat("repair what rank ", rank, " raised; its own error has the whole text")});
  }
  base::raise_if_any(std::move(problems), "attend", group.rank(), group.size());
}

}  // namespace

kernels::KernelOutput attend_together(const exchange::Group& group,
                                      const std::function<kernels::KernelOutput()>& attend) {
  kernels::KernelOutput local;
  std::exception_ptr failure;
  try {
    local = attend();
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    try {
      group.gather_texts(reason_of(failure));
    } catch (const base::Error&) {  // the others are gone: what this rank raised still comes first
    }
    std::rethrow_exception(failure);
  }
  raise_for_others(group.gather_texts(""), group);
  return local;
}

}  // namespace ulysses::processors
