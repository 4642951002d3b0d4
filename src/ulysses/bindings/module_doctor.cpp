#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ulysses/bindings/module.h"
#include "ulysses/doctor/check_attention.h"
#include "ulysses/doctor/check_same.h"

namespace ulysses::bindings {

namespace py = pybind11;
using doctor::AttentionCheck;

void bind_doctor(py::module_& module) {
  py::class_<AttentionCheck>(module, "AttentionCheck", "What check_attention found; equal on every rank.")
      .def_property_readonly("ok", &AttentionCheck::ok)
      .def_readonly("diagnosis", &AttentionCheck::diagnosis)
      .def_readonly("forward_error", &AttentionCheck::forward_error)
      .def_readonly("dq_error", &AttentionCheck::dq_error)
      .def_readonly("dk_error", &AttentionCheck::dk_error)
      .def_readonly("dv_error", &AttentionCheck::dv_error)
      .def("__str__", &AttentionCheck::text)
      .def("__repr__", &AttentionCheck::text);
  module.def(
      "check_attention",
      [](const py::object& function, const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool is_causal) {
        const auto attention = [&function](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          const py::gil_scoped_acquire gil;
          const py::object result = function(q, k, v);
          if (!THPVariable_Check(result.ptr()))
            throw py::type_error("the call returned " + std::string(py::str(py::type::of(result).attr("__name__"))) +
                                 " instead of one tensor like q");
          return py::cast<at::Tensor>(result);
        };
        const py::gil_scoped_release no_gil;
        return doctor::check_attention(attention, exchange::Group(group), is_causal);
      },
      py::arg("function"), py::arg("group"), py::arg("is_causal"));
  module.def(
      "check_same",
      [](const std::map<std::string, at::Tensor>& tensors, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        doctor::check_same(tensors, exchange::Group(group));
      },
      py::arg("tensors"), py::arg("group"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace ulysses::bindings
