// The Python module moe_ep._C_nvshmem: rails and low latency over NVSHMEM. It is built where NVSHMEM's wheel is found,
// and its library must be in the process before it is imported.
#include "bindings/low_latency.h"
#include "bindings/rail.h"
#include "nvshmem/low_latency_nvshmem.h"
#include "nvshmem/rail_nvshmem.h"

namespace py = pybind11;

PYBIND11_MODULE(_C_nvshmem, module) {
  using moe_ep::NvshmemRail;
  module.doc() = "What moe_ep does between nodes over NVSHMEM.";
  module.def("register_kernels", &moe_ep::register_kernels);
  moe_ep::bind_rail_round(module);
  py::class_<NvshmemRail> rail(module, "NvshmemRail");
  rail.def(py::init<int, const std::vector<int>&, int64_t, uintptr_t, uintptr_t, double>(), py::kw_only(),
           py::arg("node"), py::arg("pes"), py::arg("flow_bytes"), py::arg("node_state"), py::arg("record"),
           py::arg("timeout_secs"), py::call_guard<py::gil_scoped_release>());
  rail.def("release", &NvshmemRail::release, py::call_guard<py::gil_scoped_release>());
  rail.def("address_at", &NvshmemRail::address_at, py::arg("pe"));
  moe_ep::bind_rail(rail);

  using moe_ep::NvshmemLowLatency;
  const py::call_guard<py::gil_scoped_release> no_gil;
  moe_ep::bind_low_latency_calls(module);
  py::class_<NvshmemLowLatency> memory(module, "NvshmemLowLatency");
  memory.def(py::init<int, int, uintptr_t, uintptr_t, double>(), py::kw_only(), py::arg("rank"), py::arg("size"),
             py::arg("state"), py::arg("record"), py::arg("timeout_secs"), no_gil);
  memory.def("watch", &NvshmemLowLatency::watch, py::kw_only(), py::arg("state"), py::arg("record"),
             py::arg("timeout_secs"));
  memory.def("allocate", &NvshmemLowLatency::allocate, no_gil, py::arg("words_a_slot"), py::arg("bytes_a_slot"));
  memory.def("open", &NvshmemLowLatency::open, py::arg("stored_to"));
  memory.def("release", &NvshmemLowLatency::release, no_gil);
  memory.def("put_to", &NvshmemLowLatency::put_to);
  moe_ep::bind_low_latency_memory(memory);
}
