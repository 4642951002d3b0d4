#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ulysses/base/text.h"
#include "ulysses/bindings/module.h"
#include "ulysses/bindings/ops_call.h"
#include "ulysses/kernels/environment.h"
#include "ulysses/kernels/kernel.h"
#include "ulysses/processors/attention_processor.h"
#include "ulysses/processors/registry.h"

namespace ulysses::bindings {
namespace {

namespace py = pybind11;
using processors::AttendCall;
using processors::AttentionResult;
using processors::Exchanged;
using processors::UlyssesAttentionProcessor;
using strategy::AttentionPlan;
using strategy::Qkv;
using strategy::Strategy;

kernels::KernelOutput as_output(const py::object& result, std::string_view method) {
  if (py::isinstance<py::tuple>(result)) {
    const auto pair = py::cast<py::tuple>(result);
    if (pair.size() == 2) return {py::cast<at::Tensor>(pair[0]), py::cast<at::Tensor>(pair[1])};
  } else if (THPVariable_Check(result.ptr())) {
    return {py::cast<at::Tensor>(result), {}};
  }
  throw base::Error({{"CP052", base::ErrorKind::kInvalidArgument,
                      base::cat(method, "() returned ", std::string(py::str(py::type::of(result)))), "",
                      "return out, or (out, lse)"}},
                    method);
}

// The step of the template method that a Python override gets: what to move, and the base class's way of moving it.
struct ExchangeStep {
  const AttentionPlan& plan;
  const Strategy& strategy;
  const exchange::Group& group;
};

// Calls Python overrides with the interpreter lock held.
class PyProcessor : public UlyssesAttentionProcessor {
 public:
  std::vector<std::string> supports() const override {
    const py::gil_scoped_acquire gil;
    const py::object names = py::cast(this).attr("supports");
    return py::cast<std::vector<std::string>>(py::list(names));
  }

  bool overrides_exchange() const override {
    const py::gil_scoped_acquire gil;
    const auto* base = static_cast<const UlyssesAttentionProcessor*>(this);
    return py::get_override(base, "exchange") || py::get_override(base, "restore");
  }

  kernels::KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const AttendCall& call) override {
    const py::gil_scoped_acquire gil;
    const auto* base = static_cast<const UlyssesAttentionProcessor*>(this);
    const py::function attend = py::get_override(base, "attend");
    if (!attend)
      throw base::Error({{"CP051", base::ErrorKind::kInvalidArgument,
                          base::cat(std::string(py::str(py::type::of(py::cast(this)))), " has no attend()"), "",
                          "define attend(self, q, k, v, call) -> out or (out, lse)"}},
                        "attend");
    return as_output(attend(q, k, v, call), "attend");
  }

  Exchanged exchange(const AttentionPlan& plan, const Strategy& strategy, const Qkv& qkv,
                     const exchange::Group& group) override {
    const py::gil_scoped_acquire gil;
    const auto* base = static_cast<const UlyssesAttentionProcessor*>(this);
    if (const py::function override = py::get_override(base, "exchange")) {
      const auto views = py::cast<std::tuple<at::Tensor, at::Tensor, at::Tensor>>(
          override(qkv.q, qkv.k, qkv.v, plan, group.process_group()));
      return {{std::get<0>(views), std::get<1>(views), std::get<2>(views)}, {}};
    }
    const py::gil_scoped_release no_gil;
    return UlyssesAttentionProcessor::exchange(plan, strategy, qkv, group);
  }

  AttentionResult restore(const AttentionPlan& plan, const Strategy& strategy, const kernels::KernelOutput& local,
                          const exchange::Group& group) override {
    const py::gil_scoped_acquire gil;
    const auto* base = static_cast<const UlyssesAttentionProcessor*>(this);
    if (const py::function override = py::get_override(base, "restore")) {
      const auto shards = as_output(override(local.out, local.lse, plan, group.process_group()), "restore");
      return {shards.out, shards.lse};
    }
    const py::gil_scoped_release no_gil;
    return UlyssesAttentionProcessor::restore(plan, strategy, local, group);
  }
};

py::tuple range_pair(const partition::Range& range) { return py::make_tuple(range.begin, range.end); }

at::Tensor positions(const partition::Range& range) { return at::arange(range.begin, range.end, at::kLong); }

std::optional<at::Tensor> given(const at::Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; }

void bind_call(py::module_& module) {
  py::class_<AttendCall>(module, "AttendCall", "What attend() is told: see UlyssesAttentionProcessor.attend.")
      .def_readonly("is_causal", &AttendCall::is_causal)
      .def_readonly("softmax_scale", &AttendCall::softmax_scale)
      .def_property_readonly("q_positions", [](const AttendCall& call) { return positions(call.q_positions); })
      .def_property_readonly("kv_positions", [](const AttendCall& call) { return positions(call.kv_positions); })
      .def_property_readonly("attn_mask", [](const AttendCall& call) { return given(call.attn_mask); })
      .def_property_readonly("sinks", [](const AttendCall& call) { return given(call.sinks); })
      .def_readonly("softcap", &AttendCall::softcap)
      .def_property_readonly("window", [](const AttendCall&) { return py::none(); })
      .def_property_readonly("dropout_p", [](const AttendCall&) { return 0.0; })
      .def_property_readonly("dropout_seed", [](const AttendCall&) { return py::none(); })
      .def_readonly("q_head_start", &AttendCall::q_head_start)
      .def_readonly("need_lse", &AttendCall::need_lse);
  py::class_<AttentionPlan>(module, "AttentionPlan", "How one call is spread over the ranks.")
      .def_readonly("cp_rank", &AttentionPlan::cp_rank)
      .def_readonly("cp_size", &AttentionPlan::cp_size)
      .def_readonly("lengths", &AttentionPlan::lengths)
      .def_readonly("kv_lengths", &AttentionPlan::kv_lengths)
      .def_readonly("rows", &AttentionPlan::rows)
      .def_property_readonly(
          "q_heads",
          [](const AttentionPlan& plan) { return range_pair(plan.heads.query[static_cast<size_t>(plan.cp_rank)]); })
      .def_property_readonly("kv_heads", [](const AttentionPlan& plan) {
        return range_pair(plan.heads.kv[static_cast<size_t>(plan.cp_rank)]);
      });
}

// Casts q, k and v as the op does under autocast, and lets attend() compute in that dtype.
class Autocast {
 public:
  explicit Autocast(c10::DeviceType device) : device_(device), enabled_(at::autocast::is_autocast_enabled(device)) {
    if (enabled_) off_.emplace(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  }
  at::Tensor operator()(const at::Tensor& tensor) const {
    return enabled_ ? at::autocast::cached_cast(at::autocast::get_autocast_dtype(device_), tensor, device_) : tensor;
  }

 private:
  c10::DeviceType device_;
  bool enabled_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> off_;
};

}  // namespace

void bind_processors(py::module_& module) {
  bind_call(module);
  py::class_<UlyssesAttentionProcessor, PyProcessor, std::shared_ptr<UlyssesAttentionProcessor>>(
      module, "UlyssesAttentionProcessor")
      .def(py::init<>())
      .def(
          "_forward",
          [](UlyssesAttentionProcessor& processor, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
             const std::optional<at::Tensor>& attn_mask, const std::optional<at::Tensor>& sinks,
             const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::vector<int64_t>& lengths,
             const std::vector<int64_t>& padded_lengths, const std::vector<int64_t>& kv_lengths,
             const std::vector<int64_t>& kv_padded_lengths, bool is_causal, std::optional<double> softmax_scale,
             bool return_lse, const std::string& config) {
            const OpCall call = op_call(lengths, padded_lengths, kv_lengths, kv_padded_lengths, is_causal,
                                        softmax_scale, return_lse, config);
            const Autocast autocast(q.device().type());
            const AttentionResult result =
                processor.forward(autocast(q), autocast(k), autocast(v), exchange::Group(group), call.options(),
                                  {attn_mask.value_or(at::Tensor()), sinks.value_or(at::Tensor())});
            return std::make_pair(result.out, result.lse);
          },
          py::call_guard<py::gil_scoped_release>());
  module.def("register_backend", &processors::register_backend);
  module.def("unregister_backend", &processors::unregister_backend);
  module.def("backend_names", &processors::backend_names);
  module.def("find_backend", &processors::find_backend);
  // Which kernel a plain call of an equal number of heads on CPU gets.
  module.def(
      "auto_kernel",
      [](const std::string& dtype, int64_t head_dim) {
        kernels::KernelNeed need;
        need.dtype = dtype;
        need.head_dim = need.v_head_dim = head_dim;
        std::string why;
        const auto* kernel =
            kernels::select_kernel(kernels::requested_kernel("auto"), need, kernels::all_kernels(), &why);
        if (kernel == nullptr) throw py::value_error(why);
        return std::string(kernel->name());
      },
      py::arg("dtype"), py::arg("head_dim") = 64);
  module.def("kernel_names", [] {
    std::vector<std::string> names;
    for (const kernels::Kernel* kernel : kernels::all_kernels()) names.emplace_back(kernel->name());
    return names;
  });
}

}  // namespace ulysses::bindings
