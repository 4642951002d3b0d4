// The Python module ulysses_attention._C: names and conversions only.
#include "ulysses/bindings/module.h"

#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "ulysses/base/error.h"

namespace ulysses::bindings {
namespace {

namespace py = pybind11;

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const base::Error& error) {
    switch (error.kind()) {
      case base::ErrorKind::kInvalidArgument:
        py::set_error(PyExc_ValueError, error.what());
        break;
      case base::ErrorKind::kUnsupported:
        py::set_error(PyExc_NotImplementedError, error.what());
        break;
      default:
        py::set_error(PyExc_RuntimeError, error.what());
    }
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch.distributed");  // registers ProcessGroup with pybind11
  py::register_exception_translator(&translate);
  bind_contract(module);
  bind_transports(module);
  bind_processors(module);
  bind_doctor(module);
  bind_examine(module);
}

}  // namespace ulysses::bindings
