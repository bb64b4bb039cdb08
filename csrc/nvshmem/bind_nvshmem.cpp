// The Python module moe_ep._C_nvshmem: rails over NVSHMEM. It is built where NVSHMEM's wheel is found, and its library
// must be in the process before it is imported.
#include "bindings/rail.h"
#include "nvshmem/rail_nvshmem.h"

namespace py = pybind11;

PYBIND11_MODULE(_C_nvshmem, module) {
  using moe_ep::NvshmemRail;
  module.doc() = "Rails of moe_ep over NVSHMEM.";
  module.def("register_kernels", &moe_ep::register_kernels);
  moe_ep::bind_rail_round(module);
  py::class_<NvshmemRail> rail(module, "NvshmemRail");
  rail.def(py::init<int, const std::vector<int>&, int64_t, uintptr_t, uintptr_t, double>(), py::kw_only(),
           py::arg("node"), py::arg("pes"), py::arg("flow_bytes"), py::arg("node_state"), py::arg("record"),
           py::arg("timeout_secs"), py::call_guard<py::gil_scoped_release>());
  rail.def("release", &NvshmemRail::release, py::call_guard<py::gil_scoped_release>());
  rail.def("address_at", &NvshmemRail::address_at, py::arg("pe"));
  moe_ep::bind_rail(rail);
}
