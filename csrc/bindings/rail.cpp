// moe_ep._C.IpcRail and the sum over nodes. The contracts are in the headers.
#include "bindings/rail.h"

#include "bindings/binding.h"
#include "bindings/row_names.h"
#include "internode/node_sum.h"
#include "internode/rail_ipc.h"

namespace py = pybind11;

namespace moe_ep {
namespace {

void node_sum(uintptr_t inbox, int64_t flow_bytes, uintptr_t own, bool own_by_place, std::array<uintptr_t, 2> bias,
              uintptr_t place, int node, int num_nodes, int64_t first_token, int64_t num_tokens, int64_t row_bytes,
              uintptr_t y, uint64_t poison, uintptr_t state, const std::string& dtype, int num_sms, uintptr_t stream) {
  NodeSumInput input;
  input.inbox = pointer_from<const char>(inbox);
  input.flow_bytes = flow_bytes;
  input.own = pointer_from<const char>(own);
  input.own_by_place = own_by_place;
  input.bias[0] = pointer_from<const char>(bias[0]);
  input.bias[1] = pointer_from<const char>(bias[1]);
  input.place = pointer_from<const int32_t>(place);
  input.node = node;
  input.num_nodes = num_nodes;
  input.first_token = first_token;
  input.num_tokens = num_tokens;
  input.row_bytes = row_bytes;
  input.y = pointer_from<char>(y);
  input.poison = poison;
  input.state = pointer_from<const State>(state);
  launch_node_sum(input, row_kind(dtype), num_sms, stream_from(stream));
}

}  // namespace

void bind_rails(py::module_& module) {
  module.attr("max_nodes") = kMaxNodes;
  bind_rail_round(module);
  py::class_<IpcRail> rail(module, "IpcRail");
  rail.def(py::init<int, int, int64_t, uintptr_t, uintptr_t, double>(), py::kw_only(), py::arg("node"),
           py::arg("num_nodes"), py::arg("flow_bytes"), py::arg("node_state"), py::arg("record"),
           py::arg("timeout_secs"));
  rail.def("export_block", [](const IpcRail& self) { return py::bytes(self.export_block()); });
  rail.def("open_block", &IpcRail::open_block, NoGil());
  bind_rail(rail);
  module.def("node_sum", &node_sum, NoGil(), py::kw_only(), py::arg("inbox"), py::arg("flow_bytes"), py::arg("own"),
             py::arg("own_by_place"), py::arg("bias"), py::arg("place"), py::arg("node"), py::arg("num_nodes"),
             py::arg("first_token"), py::arg("num_tokens"), py::arg("row_bytes"), py::arg("y"), py::arg("poison"),
             py::arg("state"), py::arg("dtype"), py::arg("num_sms"), py::arg("stream"));
}

}  // namespace moe_ep
