#include "ulysses/exchange/agreement.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_set>

#include "ulysses/contract/fingerprint.h"

namespace ulysses::exchange {
namespace {

// Note [What agreement cannot see]
// Under kAuto over a process group only the first use of each text is compared, because a comparison costs a
// collective. A rank that later calls with another text that is new to it enters the comparison while the others are
// already exchanging data: with other sizes Gloo ends the process and NCCL waits for its timeout. If both texts were
// agreed before, and the sizes are equal (causal against not causal), numbers may be wrong. kAlways sees both.

// The texts that each live group has agreed on. Keyed by the group itself, which a weak pointer keeps from being
// confused with a later group at the same address.
class AgreedTexts {
 public:
  bool contains(const Group& group, uint64_t hash) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Entry* entry = find(group);
    return entry != nullptr && entry->hashes.contains(hash);
  }

  void insert(const Group& group, uint64_t hash) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (find(group) == nullptr) {
      std::erase_if(entries_, [](const auto& item) { return item.second.group.expired(); });
      entries_.insert_or_assign(group.process_group().get(), Entry{Weak(group.process_group()), {}});
    }
    entries_.at(group.process_group().get()).hashes.insert(hash);
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  struct Entry {
    Weak group;
    std::unordered_set<uint64_t> hashes;
  };

  Entry* find(const Group& group) {
    const auto found = entries_.find(group.process_group().get());
    return found == entries_.end() || found->second.group.expired() ? nullptr : &found->second;
  }

  std::mutex mutex_;
  std::map<const c10d::ProcessGroup*, Entry> entries_;
};

AgreedTexts& agreed_texts() {
  static AgreedTexts texts;
  return texts;
}

}  // namespace

std::optional<AgreementMode> agreement_mode(std::string_view word) {
  if (word == "off") return AgreementMode::kOff;
  if (word == "always") return AgreementMode::kAlways;
  if (word != "auto") return std::nullopt;
  const char* environment = std::getenv("ULYSSES_AGREEMENT");
  return environment != nullptr && std::string_view(environment) == "always" ? AgreementMode::kAlways
                                                                             : AgreementMode::kAuto;
}

Agreement agree(const Group& group, const AgreementRequest& request) {
  const uint64_t hash = contract::fingerprint_hash(request.text);
  const bool first_use_only = request.mode == AgreementMode::kAuto && !group.agreement_is_free();
  const bool known = first_use_only && !request.failed && agreed_texts().contains(group, hash);
  if (!request.numbers_needed && (request.mode == AgreementMode::kOff || known)) return {};
  Agreement result;
  if (request.capturing) {
    result.impossible = true;
    return result;
  }

  std::vector<int64_t> row = {static_cast<int64_t>(hash), request.failed ? 1 : 0};
  row.insert(row.end(), request.numbers.begin(), request.numbers.end());
  result.compared = true;
  bool equal = true;
  for (std::vector<int64_t>& other : group.gather_numbers(row)) {
    equal = equal && other[0] == row[0] && other[1] == 0;
    result.numbers.emplace_back(other.begin() + 2, other.end());
  }
  if (!equal) {
    result.texts = group.gather_texts(request.text);
  } else if (first_use_only) {
    agreed_texts().insert(group, hash);
  }
  return result;
}

}  // namespace ulysses::exchange
