// A backend of one's own and its examination: attention over local tensors, written in plain ops and without a
// backward, then asked by the doctor what it does right, what it refuses and what it gets silently wrong.
//   doctor-cpp           examines the backend: exit 0
//   doctor-cpp --wrong   examines it with a fault that raises no error: names the fault, exit 1
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ulysses/ulysses.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

at::Tensor positions(const ulysses::Range& range) { return at::arange(range.begin, range.end); }

class MatmulBackend : public ulysses::UlyssesAttentionProcessor {
 public:
  // What attend() below reads of its call. Everything else is refused before it is called.
  std::vector<std::string> supports() const override {
    return {"is_causal", "softmax_scale", "q_positions", "need_lse"};
  }

 protected:
  ulysses::KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const ulysses::AttendCall& call) override {
    // 16-bit inputs are summed in float32. K and V are shared by the query heads of a group, not repeated.
    const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const int64_t num_q_per_kv = q.size(2) / k.size(2);
    const auto by_head = [&](const at::Tensor& x) { return x.to(wide).permute({0, 2, 1, 3}).unsqueeze(2); };
    const at::Tensor queries = q.to(wide).unflatten(2, {k.size(2), num_q_per_kv}).permute({0, 2, 3, 1, 4});
    const double scale = call.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
    at::Tensor scores = at::matmul(queries, by_head(k).transpose(3, 4)) * scale;  // [B, h_kv, h / h_kv, Sq, Skv]
    if (call.is_causal) {
      const at::Tensor later = positions(call.kv_positions) > positions(call.q_positions).unsqueeze(1);
      scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
    }
    const at::Tensor lse = at::logsumexp(scores, {-1}, /*keepdim=*/true);
    const at::Tensor out = at::matmul((scores - lse).exp(), by_head(v));
    return {out.permute({0, 3, 1, 2, 4}).flatten(2, 3).to(q.scalar_type()), lse.squeeze(-1).flatten(1, 2)};
  }
};

// The fault that no shape shows: the queries see the keys at their own positions only, which under allgather_kv are
// those of their rank.
class OwnPositionsOnly final : public MatmulBackend {
 protected:
  ulysses::KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const ulysses::AttendCall& call) override {
    const int64_t last = call.kv_positions.end;
    const ulysses::Range own{std::min(call.q_positions.begin, last), std::min(call.q_positions.end, last)};
    if (own.empty()) return MatmulBackend::attend(q, k, v, call);
    const auto rows = [&](const at::Tensor& x) { return x.narrow(1, own.begin, own.size()); };
    ulysses::AttendCall of_own = call;
    of_own.kv_positions = own;
    return MatmulBackend::attend(q, rows(k), rows(v), of_own);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const bool wrong = argc > 1 && std::string_view(argv[1]) == "--wrong";
  std::shared_ptr<ulysses::UlyssesAttentionProcessor> backend = std::make_shared<MatmulBackend>();
  if (wrong) backend = std::make_shared<OwnPositionsOnly>();

  ulysses::doctor::ExamineOptions options;
  options.selection.quick = true;  // one shape a feature; without it, every shape and dtype
  const ulysses::doctor::Report report = ulysses::doctor::run(ulysses::doctor::processor_target(backend), options);
  std::cout << report.text();
  return report.passed() ? 0 : 1;
}
