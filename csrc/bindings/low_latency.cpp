// moe_ep._C.LowLatency: the low-latency kernels with memory that is opened over CUDA IPC.
#include "bindings/low_latency.h"

#include "common/device_limits.h"

namespace py = pybind11;

namespace moe_ep {

void bind_low_latency(py::module_& module) {
  bind_low_latency_calls(module);
  module.def("num_sms", &device_sms);
  py::class_<IpcLowLatency> memory(module, "LowLatency");
  memory.def(py::init<const Exchange&>(), py::arg("exchange"), py::keep_alive<1, 2>())
      .def("allocate", &IpcLowLatency::allocate, py::arg("words_a_slot"), py::arg("bytes_a_slot"))
      .def("export_own", [](const IpcLowLatency& self) { return py::bytes(self.export_own()); })
      .def("open", &IpcLowLatency::open, py::arg("peer"), py::arg("exported"))
      .def("close", &IpcLowLatency::close);
  bind_low_latency_memory(memory);
}

}  // namespace moe_ep
