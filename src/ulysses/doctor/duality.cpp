#include "ulysses/doctor/duality.h"

#include <ATen/ops/cat.h>

#include <cmath>

#include "ulysses/base/text.h"

namespace ulysses::doctor {

bool Duality::holds() const { return std::abs(of_values - of_output) <= allowed; }

std::string Duality::text() const {
  return base::cat("the gradient of v belongs to other weights than the output: dv·v = ", of_values,
                   ", grad_out·out = ", of_output, ", and they must be equal");
}

Duality duality_of(const Question& question, const Observation& seen) {
  Duality duality;
  if (!seen.dv.defined() || !seen.out.isfinite().all().item<bool>()) return duality;
  const auto products = [](const at::Tensor& x, const at::Tensor& y) { return (x * y.to(at::kDouble)).flatten(); };
  at::Tensor outputs = products(seen.out, question.grad_out), values = products(seen.dv, question.v);
  if (question.c.text_len > 0) {
    outputs = at::cat({outputs, products(seen.text_out[0], question.text_grad_out)});
    values = at::cat({values, products(seen.text_dv, question.text_v)});
  }
  duality.complete = true;
  duality.of_values = values.sum().item<double>();
  duality.of_output = outputs.sum().item<double>();
  const double relative = question.c.dtype.ends_with("16") ? 2e-2 : 1e-4;
  duality.allowed = relative * outputs.abs().sum().item<double>();
  return duality;
}

}  // namespace ulysses::doctor
