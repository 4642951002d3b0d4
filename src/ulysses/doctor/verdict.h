#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "ulysses/doctor/rank_answer.h"
#include "ulysses/doctor/reference.h"

namespace ulysses::doctor {

enum class VerdictKind {
  kOk,
  kRefused,  // on every rank, with a text that says what
  kWrong,    // numbers, shapes or dtypes are not those of one process
  kCrashed,  // a process ended, or the ranks' collectives did not fit together
  kHung,
  kOneRankOnly,     // some ranks raised, others did not
  kUnclearMessage,  // an exception that is not ours and says nothing of what was asked
};

// "ok", "refused", "wrong", "crashed", "hung", "one_rank_only", "unclear_message".
std::string_view to_string(VerdictKind kind);

// What is compared: the sequence's and the joint tokens' results, and gradients of all inputs.
inline constexpr std::array<std::string_view, 12> kTensors = {
    "out", "lse", "dq", "dk", "dv", "joint_out", "joint_lse", "joint_dq", "joint_dk", "joint_dv", "dmask", "dsinks"};

struct Verdict {
  VerdictKind kind = VerdictKind::kOk;
  double error = -1;                 // largest absolute error of any tensor against float64; −1: nothing was compared
  double allowed = -1;               // its bound
  std::string tensor;                // the one that is worst against its bound, see kTensors
  std::string message;               // what was raised, or what is off
  std::string tokens, heads, ranks;  // where it is wrong: "8-31"; "" where nothing is
  bool is_forward = false;           // an out or lse is wrong, whatever the gradients are
};

// The rows of all ranks in token order, float64; undefined where a rank gave none or one of another shape. What every
// rank holds alike: of the joint tokens' results each rank's, of the gradients their sum.
struct Observation {
  Verdict failure;                  // kOk when every rank returned what can be compared
  at::Tensor out, lse, dq, dk, dv;  // lse as [B, S, H, 1]
  at::Tensor text_out, text_lse;    // [W, B, T, H, D_v | 1]
  at::Tensor text_dq, text_dk, text_dv, dmask, dsinks;
  std::vector<RankAnswer> answers;
  bool complete() const { return failure.kind == VerdictKind::kOk; }
};

Observation assemble(const Question& question, std::vector<RankAnswer> answers);

// Compares with one process in float64. Bounds: float64 1e-12, float32 1e-5, 16-bit one unit in the last place, two for
// gradients, which are made from an output that was rounded; each times the largest reference value (at least 1), plus
// twice the error that one process makes in the case's dtype.
Verdict judge(const Question& question, const Observation& observation);

// Rows behind the real ones of a rank that are not zero, as those of out and of every gradient must be; "" if there are
// none.
std::string padding_problem(const Case& c, std::string_view name, const at::Tensor& x, int64_t rank);

// "0-7, 16-23" of ascending numbers; "" of none.
std::string ranges(const std::vector<int64_t>& numbers);

}  // namespace ulysses::doctor
