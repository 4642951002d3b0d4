#include "ulysses/doctor/weights.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace ulysses::doctor {

at::Tensor Weights::mean_measured() const { return measured.mean({0, 2}); }
at::Tensor Weights::mean_expected() const { return expected.mean({0, 2}); }

Weights measure_weights(Examiner& examiner, const Case& c) {
  const int64_t keys = c.kv_seq_len();
  Weights weights;
  std::vector<at::Tensor> columns;
  for (int64_t begin = 0; begin < keys; begin += c.value_head_dim) {
    const int64_t count = std::min(c.value_head_dim, keys - begin);
    at::Tensor marks = at::zeros({keys, c.value_head_dim});
    marks.narrow(0, begin, count).narrow(1, 0, count).copy_(at::eye(count));
    Question question = uniform_question(
        c, marks.view({1, keys, 1, c.value_head_dim}).expand({c.batch, keys, c.num_kv_heads, c.value_head_dim}));
    const Observation seen = examiner.observe(question);
    if (!seen.complete()) return weights;
    columns.push_back(seen.out.narrow(3, 0, count));
    if (begin > 0) continue;
    const TextAndRows by_query = part_text(c, attention_weights(question), 2);
    weights.expected = part_text(c, by_query.rows, 3).rows.transpose(1, 2);
  }
  weights.measured = at::cat(columns, 3);
  return weights;
}

at::Tensor influence(Examiner& examiner, const Case& c, Changed changed) {
  const Case forward = forward_only(c);
  const Question base = make_question(forward);
  const Question other = make_question(forward, /*seed=*/2);
  const Observation before = examiner.observe(base);
  at::Tensor moved = at::zeros({c.cp_size, c.cp_size}, at::kBool);
  if (!before.complete()) return moved;
  for (int64_t kr = 0; kr < c.cp_size; ++kr) {
    Question question = base;
    at::Tensor& target = changed == Changed::kKeys ? question.k : question.v;
    const at::Tensor& source = changed == Changed::kKeys ? other.k : other.v;
    const int64_t begin = c.kv_token_begin(kr), count = c.kv_lengths[static_cast<size_t>(kr)];
    target = target.clone();
    target.narrow(1, begin, count).copy_(source.narrow(1, begin, count));
    const Observation after = examiner.observe(question);
    if (!after.complete()) continue;
    for (int64_t qr = 0; qr < c.cp_size; ++qr) {
      const auto rows = [&](const at::Tensor& x) {
        return x.narrow(1, c.token_begin(qr), c.lengths[static_cast<size_t>(qr)]);
      };
      const at::Tensor difference = (rows(after.out) - rows(before.out)).abs();
      moved[qr][kr] = difference.numel() > 0 && difference.max().item<double>() > 0;
    }
  }
  return moved;
}

}  // namespace ulysses::doctor
