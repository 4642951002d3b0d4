#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "ulysses/base/text.h"
#include "ulysses/doctor/ranks.h"

namespace ulysses::doctor {
namespace {

int64_t bits(double value) {
  int64_t number = 0;
  std::memcpy(&number, &value, sizeof number);
  return number;
}

double from_bits(int64_t number) {
  double value = 0;
  std::memcpy(&value, &number, sizeof value);
  return value;
}

// An answer as 64-bit numbers, so that it travels over any group: outcome, counts, then per tensor its dtype, sizes
// and elements as the bits of float64.
std::vector<int64_t> pack(const RankAnswer& answer) {
  std::vector<int64_t> numbers = {static_cast<int64_t>(answer.outcome), answer.collectives, answer.bytes_sent};
  for (const at::Tensor* tensor : RankAnswer::tensors(answer)) {
    numbers.push_back(tensor->defined() ? static_cast<int64_t>(tensor->scalar_type()) : -1);
    if (!tensor->defined()) continue;
    numbers.push_back(tensor->dim());
    numbers.insert(numbers.end(), tensor->sizes().begin(), tensor->sizes().end());
    const at::Tensor values = tensor->to(at::kDouble).contiguous();
    const auto* begin = values.const_data_ptr<double>();
    std::transform(begin, begin + values.numel(), std::back_inserter(numbers), bits);
  }
  return numbers;
}

RankAnswer unpack(const std::vector<int64_t>& numbers, const std::string& message, const std::string& violation) {
  RankAnswer answer;
  answer.outcome = static_cast<Outcome>(numbers[0]);
  answer.message = message;
  answer.violation = violation;
  answer.collectives = numbers[1];
  answer.bytes_sent = numbers[2];
  auto next = numbers.begin() + 3;
  for (at::Tensor* tensor : RankAnswer::tensors(answer)) {
    const int64_t dtype = *next++;
    if (dtype < 0) continue;
    const int64_t dim = *next++;
    const std::vector<int64_t> sizes(next, next + dim);
    next += dim;
    const at::Tensor values = at::empty(sizes, at::kDouble);
    std::transform(next, next + values.numel(), values.mutable_data_ptr<double>(), from_bits);
    next += values.numel();
    *tensor = values.to(static_cast<at::ScalarType>(dtype));
  }
  return answer;
}

}  // namespace

std::vector<RankAnswer> GroupRanks::ask(const Question& question) {
  if (question.c.cp_size != group_.size()) {  // every rank sees this alike
    RankAnswer refusal;
    refusal.outcome = Outcome::kRaised;
    refusal.message = base::cat("a group of ", group_.size(), " ranks cannot answer for cp_size=", question.c.cp_size);
    return std::vector(static_cast<size_t>(question.c.cp_size), refusal);
  }
  const RankAnswer mine = answer_on_rank(question, target_, group_);
  std::vector<int64_t> numbers = pack(mine);
  int64_t longest = 0;
  for (const auto& length : answers_.gather_numbers({static_cast<int64_t>(numbers.size())}))
    longest = std::max(longest, length[0]);
  numbers.resize(static_cast<size_t>(longest));
  const auto messages = answers_.gather_texts(mine.message), violations = answers_.gather_texts(mine.violation);
  std::vector<RankAnswer> answers;
  size_t rank = 0;
  for (const auto& packed : answers_.gather_numbers(numbers)) {
    answers.push_back(unpack(packed, messages[rank], violations[rank]));
    ++rank;
  }
  return answers;
}

}  // namespace ulysses::doctor
