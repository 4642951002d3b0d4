#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ulysses/bindings/module.h"
#include "ulysses/exchange/group.h"
#include "ulysses/transports/recording/recording_group.h"
#include "ulysses/transports/shm/shm_backend.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses::bindings {

namespace py = pybind11;
using transports::CollectiveRecord;
using transports::Recorder;
using transports::ThreadWorld;

void bind_transports(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ThreadWorld>(module, "ThreadWorld")
      .def(py::init<int64_t, std::chrono::milliseconds>(), py::arg("world_size"), py::arg("timeout"))
      .def_property_readonly("size", &ThreadWorld::size)
      .def("group", &ThreadWorld::group, py::arg("rank"))
      .def("abort", &ThreadWorld::abort, py::arg("rank"), py::arg("reason"), no_gil);

  // What torch.distributed calls for backend="ulysses_shm".
  module.def(
      "make_shm_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
         std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<transports::ShmBackend>(store, rank, size, timeout);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), no_gil);
  module.attr("SHM_BACKEND") = transports::kShmBackendName;

  py::class_<CollectiveRecord>(module, "CollectiveRecord")
      .def_readonly("name", &CollectiveRecord::name)
      .def_readonly("bytes_sent", &CollectiveRecord::bytes_sent)
      .def("__repr__", [](const CollectiveRecord& record) {
        return "CollectiveRecord(" + record.name + ", bytes_sent=" + std::to_string(record.bytes_sent) + ")";
      });
  py::class_<Recorder, std::shared_ptr<Recorder>>(module, "Recorder")
      .def(py::init<>())
      .def("records", &Recorder::records)
      .def("clear", &Recorder::clear);
  module.def("record_group", &transports::record_group, py::arg("group"), py::arg("recorder"));
  module.def(
      "gather_texts",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& text) {
        return exchange::Group(group).gather_texts(text);
      },
      py::arg("group"), py::arg("text"), no_gil);
}

}  // namespace ulysses::bindings
