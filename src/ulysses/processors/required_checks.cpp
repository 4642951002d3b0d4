#include "ulysses/processors/required_checks.h"

#include <numeric>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/exchange/checksum.h"
#include "ulysses/processors/tensor_spec.h"

namespace ulysses::processors {
namespace {

using strategy::AttentionPlan;
using strategy::LocalWork;
using strategy::Qkv;

std::string kv_problem(const AttentionPlan& plan, const LocalWork& work, const Qkv& views,
                       const std::vector<std::vector<int64_t>>& announced) {
  if (views.k.dim() != 4 || views.v.dim() != 4)
    return base::cat("this backend's K has shape ", views.k.sizes(), " and its V ", views.v.sizes(),
                     " instead of [B, S_global, h_kv, D]");
  const int64_t tokens = views.k.size(1);
  if (tokens != plan.kv_seq_len() || views.v.size(1) != tokens)
    return base::cat("this backend's K covers ", tokens, " and its V ", views.v.size(1), " of ", plan.kv_seq_len(),
                     " tokens");
  const auto heads = plan.num_kv_heads;
  if (views.v.size(2) != views.k.size(2) || work.kv_head_begin + views.k.size(2) > heads)
    return base::cat("this backend's K has ", views.k.size(2), " and its V ", views.v.size(2), " heads from head ",
                     work.kv_head_begin, " of ", heads);
  int64_t begin = 0;
  for (size_t rank = 0; rank < plan.kv_lengths.size(); ++rank) {
    const int64_t length = plan.kv_lengths[rank];
    const auto k = exchange::head_checksums(views.k.narrow(1, begin, length));
    const auto v = exchange::head_checksums(views.v.narrow(1, begin, length));
    for (size_t head = 0; head < k.size(); ++head) {
      const size_t global = head + static_cast<size_t>(work.kv_head_begin);
      const bool same_k = k[head] == announced[rank][global];
      const bool same_v = v[head] == announced[rank][global + static_cast<size_t>(heads)];
      if (!same_k || !same_v)
        return base::cat("tokens ", begin, "-", begin + length - 1, " of ", same_k ? "V" : "K", " (head ", global,
                         ") are not what rank ", rank, " holds");
    }
    begin += length;
  }
  return "";
}

}  // namespace

void check_kv_content(const AttentionPlan& plan, const LocalWork& work, const Qkv& shards, const Qkv& views,
                      const exchange::Group& group) {
  std::vector<int64_t> announced = exchange::head_checksums(shards.k.narrow(1, 0, plan.kv_length()));
  const std::vector<int64_t> v = exchange::head_checksums(shards.v.narrow(1, 0, plan.kv_length()));
  announced.insert(announced.end(), v.begin(), v.end());
  const std::string problem = kv_problem(plan, work, views, group.gather_numbers(announced));
  // A fault may show on some ranks only, and nobody may go on alone.
  std::vector<base::Problem> problems;
  for (const std::vector<int64_t>& bad : group.gather_numbers({problem.empty() ? 0 : 1}))
    if (bad[0] != 0 && problems.empty())
      problems.push_back({"CP053", base::ErrorKind::kInvalidArgument,
                          problem.empty() ? "another rank's keys and values are not the group's" : problem,
                          "A query must see the keys and values of every rank",
                          "gather K and V of all ranks in rank order, or leave exchange() to the base class"});
  base::raise_if_any(std::move(problems), "kv_global_gathered", plan.cp_rank, plan.cp_size);
}

void check_output(const AttentionPlan& plan, const Qkv& shards, const AttentionResult& result) {
  const std::vector<int64_t> wanted = {shards.q.size(0), plan.joint_len + plan.rows, plan.num_heads, plan.v_head_dim};
  const auto dtype = shards.q.scalar_type();
  if (result.out.sizes().vec() == wanted && result.out.scalar_type() == dtype) return;
  throw base::Error({{"CP052", base::ErrorKind::kInvalidArgument,
                      base::cat("restore() returned out ", dtype_name(result.out.scalar_type()), " ",
                                result.out.sizes(), " for q ", shards.q.sizes()),
                      "The output is restored on the sequence dimension, 1",
                      base::cat("return out of shape [", base::join(wanted), "] in torch.", dtype_name(dtype))}},
                    "output_restore_dim", plan.cp_rank, plan.cp_size);
}

}  // namespace ulysses::processors
