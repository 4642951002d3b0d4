#include <array>
#include <numeric>
#include <tuple>
#include <utility>

#include "ulysses/base/text.h"
#include "ulysses/contract/attention_facts.h"
#include "ulysses/contract/rules.h"

// The rules about attn_mask: CP027, CP028, CP040, and CP022 for its device.
namespace ulysses::contract {
namespace {

using base::cat;
using base::join;

constexpr int64_t kUnknown = -1;

// The sizes that mean something on one axis of a mask; kUnknown where a reading does not exist.
struct AxisSizes {
  std::string_view name;       // "S_q" or "S_kv"
  std::string_view parameter;  // of MaskLayout
  int64_t got = kUnknown;
  int64_t local = kUnknown;
  int64_t global = kUnknown;
  bool can_broadcast = false;
  bool offer_local = true;  // in a fix; not where the other axis is local
};

int64_t global_tokens(const CallFacts& facts, const LayoutSpec* layout, int64_t rows) {
  const AttentionSpec& spec = facts.spec;
  const bool equal_shards = spec.policy.require_seq_divisible || spec.cp_size == 1;
  std::optional<int64_t> tokens;
  if (layout) {
    tokens = std::accumulate(layout->lengths.begin(), layout->lengths.end(), int64_t{0});
  } else if (rows >= 0 && spec.cp_size > 0 && equal_shards) {
    tokens = checked_multiply(rows, spec.cp_size);
  }
  int64_t joined = kUnknown;
  return tokens && !__builtin_add_overflow(*tokens, spec.joint_len, &joined) ? joined : kUnknown;
}

// Joint tokens belong to no rank: with them an axis is global, of the joined sequence. [B, S_kv] has one row for all.
AxisSizes query_axis(const CallFacts& facts) {
  const auto& sizes = facts.spec.attn_mask->sizes;
  AxisSizes axis{"S_q", "q", sizes.size() == 4 ? sizes[2] : 1, kUnknown, kUnknown, true};
  axis.global = global_tokens(facts, facts.q_layout, facts.q_rows);
  if (facts.spec.joint_len == 0 && sizes.size() == 4) axis.local = facts.q_rows;
  return axis;
}

AxisSizes key_axis(const CallFacts& facts) {
  const auto& sizes = facts.spec.attn_mask->sizes;
  AxisSizes axis{"S_kv", "kv", sizes.empty() ? kUnknown : sizes.back(), kUnknown, kUnknown, false};
  if (facts.spec.kv_role == "replicated") {
    axis.global = facts.k_rows;
  } else {
    axis.global = global_tokens(facts, facts.kv_layout, facts.k_rows);
    if (facts.spec.joint_len == 0) axis.local = facts.k_rows;
  }
  return axis;
}

std::string legal_sizes(const AxisSizes& axis) {
  std::vector<std::string> sizes;
  if (axis.can_broadcast) sizes.emplace_back("1 (broadcast)");
  if (axis.local != kUnknown && axis.offer_local) sizes.push_back(cat(axis.local, " (local)"));
  if (axis.global != kUnknown) sizes.push_back(cat(axis.global, " (global)"));
  return cat(axis.name, '=', join(sizes, ", or "));
}

// Every reading that the size allows; readings that mean the same are one.
std::vector<MaskAxis> readings(const AxisSizes& axis, int64_t cp_size) {
  std::vector<MaskAxis> found;
  if (axis.can_broadcast && axis.got == 1) found.push_back(MaskAxis::kBroadcast);
  const bool is_global = axis.got == axis.global && found.empty();  // one token: the same as broadcast
  if (is_global) found.push_back(MaskAxis::kGlobal);
  const bool one_rank = cp_size == 1 && !found.empty();
  if (axis.got == axis.local && axis.local != kUnknown && !one_rank) found.push_back(MaskAxis::kLocal);
  return found;
}

// The argument that declares one axis and keeps what the other was declared as.
std::string declaration(const AttentionSpec& spec, const AxisSizes& axis, MaskAxis reading) {
  std::vector<std::string> fields;
  for (const auto& [parameter, declared] : {std::pair{"q", &spec.mask_q}, std::pair{"kv", &spec.mask_kv}}) {
    const std::string_view word = axis.parameter == parameter ? to_string(reading) : std::string_view(*declared);
    if (!word.empty()) fields.push_back(cat(parameter, "=\"", word, '"'));
  }
  return cat("mask_layout=MaskLayout(", join(fields), ')');
}

struct Reading {
  std::optional<MaskAxis> axis;
  std::optional<base::Problem> problem;
};

Reading not_readable(std::string_view id, std::string what, std::string_view rule, std::string fix) {
  return {{}, invalid(id, std::move(what), rule, std::move(fix))};
}

Reading read_declared(const CallFacts& facts, const AxisSizes& axis, const std::string& declared) {
  const bool broadcast = declared == "broadcast" && axis.can_broadcast;
  if (!broadcast && declared != "local" && declared != "global") {
    const std::vector<std::string_view> known = axis.can_broadcast
                                                    ? std::vector<std::string_view>{"broadcast", "local", "global"}
                                                    : std::vector<std::string_view>{"local", "global"};
    return {{}, unknown_word("CP033", cat("mask_layout.", axis.parameter), declared, known)};
  }
  const int64_t wanted = broadcast ? 1 : declared == "local" ? axis.local : axis.global;
  if (wanted != kUnknown && axis.got == wanted)
    return {broadcast ? MaskAxis::kBroadcast : declared == "local" ? MaskAxis::kLocal : MaskAxis::kGlobal, {}};
  std::vector<std::string> fixes;
  if (wanted != kUnknown) fixes.push_back(cat("attn_mask with ", axis.name, '=', wanted));
  for (const MaskAxis reading : readings(axis, facts.spec.cp_size))
    fixes.push_back(declaration(facts.spec, axis, reading));
  if (fixes.empty()) fixes.push_back(cat("attn_mask with ", legal_sizes(axis), ", and mask_layout=None"));
  const std::string expected = wanted == kUnknown ? std::string("no axis of this call") : cat(wanted, " rows");
  return not_readable("CP028",
                      cat("mask_layout has ", axis.parameter, "=\"", declared, "\", which is ", expected,
                          ", and attn_mask has ", axis.name, '=', axis.got),
                      "", join(fixes, ", or "));
}

Reading read_axis(const CallFacts& facts, const AxisSizes& axis, const std::string& declared) {
  const bool broadcast = axis.can_broadcast && axis.got == 1 && (declared.empty() || declared == "broadcast");
  if (axis.global == kUnknown && !broadcast)
    return not_readable("CP028",
                        cat("attn_mask has ", axis.name, '=', axis.got,
                            ", and without a layout under require_seq_divisible=False nobody knows the global length"),
                        "A mask is checked before any data moves", "layout=SequenceLayout(seq_len, cp_size, policy)");
  if (!declared.empty()) return read_declared(facts, axis, declared);
  const std::vector<MaskAxis> found = readings(axis, facts.spec.cp_size);
  if (found.size() == 1) return {found.front(), {}};
  if (found.empty())
    return not_readable("CP027", cat("attn_mask has ", axis.name, '=', axis.got),
                        facts.spec.joint_len > 0
                            ? cat("With joint tokens a mask covers the joined sequence of ", axis.global, " tokens")
                            : std::string(),
                        cat("attn_mask with ", legal_sizes(axis)));
  std::vector<std::string> fixes;
  for (const MaskAxis reading : found) fixes.push_back(declaration(facts.spec, axis, reading));
  return not_readable("CP028",
                      cat("attn_mask has ", axis.name, '=', axis.got, ", which is both ", to_string(found[0]), " and ",
                          to_string(found[1])),
                      "", join(fixes, ", or "));
}

// Whether the axis can be nothing but local, right or wrong.
bool only_local(const AxisSizes& axis, const std::string& declared, int64_t cp_size) {
  if (!declared.empty()) return declared == "local";
  return readings(axis, cp_size) == std::vector<MaskAxis>{MaskAxis::kLocal};
}

struct Axes {
  AxisSizes q_sizes, kv_sizes;
  Reading q, kv;
};

Axes read_axes(const CallFacts& facts) {
  const AttentionSpec& spec = facts.spec;
  Axes axes{query_axis(facts), key_axis(facts), {}, {}};
  if (spec.cp_size > 1) {
    axes.q_sizes.offer_local = !only_local(axes.kv_sizes, spec.mask_kv, spec.cp_size);
    axes.kv_sizes.offer_local = !only_local(axes.q_sizes, spec.mask_q, spec.cp_size);
  }
  axes.q = read_axis(facts, axes.q_sizes, spec.mask_q);
  axes.kv = read_axis(facts, axes.kv_sizes, spec.mask_kv);
  return axes;
}

// What a problem of another rule leaves undecided is not decided here.
bool shape_is_readable(const CallFacts& facts) {
  const auto& [spec, mask] = std::tie(facts.spec, facts.spec.attn_mask);
  const bool layouts_are_legal =
      (!spec.layout || facts.q_layout) && (!spec.kv_layout || facts.kv_layout || spec.kv_role == "replicated");
  const bool has_axes = mask && (mask->sizes.size() == 2 || mask->sizes.size() == 4);
  return has_axes && facts.q_is_4d && facts.k_is_4d && layouts_are_legal && facts.group_is_legal &&
         spec.joint_problem.empty();
}

std::string first_axes_fix(const CallFacts& facts) {
  return cat("attn_mask of shape [", facts.batch, "|1, ", facts.num_heads, "|1, S_q|1, S_kv], or [", facts.batch,
             ", S_kv] for key padding");
}

CallProblems type_rule(const CallFacts& facts) {
  if (facts.spec.mask_type.empty()) return {};
  const std::string fix = facts.q_is_4d ? first_axes_fix(facts) : "attn_mask of shape [B|1, H|1, S_q|1, S_kv]";
  return {invalid("CP027", cat("attn_mask is a ", facts.spec.mask_type, ", not a tensor"), "",
                  cat(fix, "; or attn_mask=None"))};
}

CallProblems shape_rule(const CallFacts& facts) {
  const auto& mask = facts.spec.attn_mask;
  if (!mask || !facts.q_is_4d || !facts.k_is_4d) return {};
  const auto& sizes = mask->sizes;
  const std::string got = cat("attn_mask has shape [", join(sizes), ']');
  if (sizes.size() != 2 && sizes.size() != 4) {
    const std::string fix = sizes.size() == 3 ? "attn_mask.unsqueeze(1), if it is [B, S_q, S_kv]; or " : "";
    return {invalid("CP027", got, "A mask is 2-D or 4-D", fix + first_axes_fix(facts))};
  }
  const bool batch = sizes[0] == facts.batch || sizes[0] == 1;
  if (sizes.size() == 4) {
    if (batch && (sizes[1] == facts.num_heads || sizes[1] == 1)) return {};
    return {invalid("CP027", cat(got, " for B=", facts.batch, " and H=", facts.num_heads),
                    "Every rank passes the mask of all heads", first_axes_fix(facts))};
  }
  if (!batch)
    return {invalid("CP027", cat(got, " for B=", facts.batch), "A 2-D mask is [B, S_kv], key padding",
                    cat("attn_mask[None, None] if it is [S_q, S_kv]; or ", first_axes_fix(facts)))};
  const bool is_local = facts.spec.joint_len == 0 && sizes[0] == facts.q_rows;
  const bool is_query_axis = sizes[0] > 1 && (is_local || sizes[0] == query_axis(facts).global);
  if (!is_query_axis || facts.spec.mask_q == "broadcast") return {};
  return {invalid("CP028", cat(got, ", which is both [B, S_kv] and [S_q, S_kv]"), "",
                  "attn_mask[:, None, None, :] for key padding, or attn_mask[None, None] for a row per query")};
}

base::Problem both_local_problem(const CallFacts& facts, const AxisSizes& q, const AxisSizes& kv) {
  const auto fix = [&](const AxisSizes& axis, const std::string& declared, MaskAxis reading, int64_t size) {
    std::string text = cat("attn_mask with ", axis.name, '=', size, " (", to_string(reading), ')');
    return declared.empty() ? text : cat(text, " and ", declaration(facts.spec, axis, reading));
  };
  return invalid("CP028", cat("attn_mask has S_q=", q.got, " and S_kv=", kv.got, ", both local"),
                 "What a rank's queries see of other ranks' keys would be nowhere",
                 cat(fix(kv, facts.spec.mask_kv, MaskAxis::kGlobal, kv.global), ", or ",
                     fix(q, facts.spec.mask_q, MaskAxis::kBroadcast, 1)));
}

CallProblems axes_rule(const CallFacts& facts) {
  if (!shape_is_readable(facts)) {
    const bool declared = !facts.spec.mask_q.empty() || !facts.spec.mask_kv.empty();
    if (facts.spec.attn_mask || !facts.spec.mask_type.empty() || !declared) return {};
    return {invalid("CP028", "mask_layout is given and attn_mask is not", "", "mask_layout=None, or the attn_mask")};
  }
  const auto [q_sizes, kv_sizes, q, kv] = read_axes(facts);
  CallProblems problems;
  add(problems, q.problem);
  add(problems, kv.problem);
  const bool both_local = q.axis == MaskAxis::kLocal && kv.axis == MaskAxis::kLocal;
  if (both_local && facts.spec.cp_size > 1) problems.push_back(both_local_problem(facts, q_sizes, kv_sizes));
  const bool sharded = q.axis == MaskAxis::kLocal || kv.axis == MaskAxis::kLocal;
  if (sharded && facts.spec.attn_mask->requires_grad)
    problems.push_back({"CP040", base::ErrorKind::kUnsupported,
                        "attn_mask requires a gradient and one of its axes is local, so it would have to be gathered",
                        "", "the global mask on every rank, or attn_mask.detach()"});
  return problems;
}

CallProblems mask_dtype_rule(const CallFacts& facts) {
  const auto& mask = facts.spec.attn_mask;
  if (!mask) return {};
  CallProblems problems;
  if (mask->dtype != "bool" && !mask->is_floating)
    problems.push_back(invalid("CP027", cat("attn_mask.dtype=", mask->dtype),
                               "A mask is bool (True = visible) or floating (added to the scores)",
                               "attn_mask.bool(), if 1 means visible"));
  if (mask->device != facts.spec.q.device)
    problems.push_back(invalid("CP022", cat("attn_mask.device=", mask->device, ", q.device=", facts.spec.q.device), "",
                               cat("attn_mask.to(\"", facts.spec.q.device, "\")")));
  return problems;
}

constexpr std::array<CallRule, 4> kRules = {type_rule, shape_rule, axes_rule, mask_dtype_rule};

}  // namespace

std::string_view to_string(MaskAxis axis) {
  switch (axis) {
    case MaskAxis::kBroadcast:
      return "broadcast";
    case MaskAxis::kLocal:
      return "local";
    default:
      return "global";
  }
}

MaskAxes mask_axes(const AttentionSpec& spec) {
  const auto [q_sizes, kv_sizes, q, kv] = read_axes(CallFacts(spec));
  return {q.axis.value_or(MaskAxis::kBroadcast), kv.axis.value_or(MaskAxis::kGlobal)};
}

std::span<const CallRule> mask_rules() { return kRules; }

}  // namespace ulysses::contract
