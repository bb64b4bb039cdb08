// How a rail looks from Python, whatever its transport: moe_ep._C.IpcRail and moe_ep._C_nvshmem.NvshmemRail.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/check.h"
#include "exchange/host.h"
#include "internode/rail.h"

namespace moe_ep {

// (x, stride in bytes, bytes) of each kind of rows that departs.
using DepartingRows = std::vector<std::array<int64_t, 3>>;

inline RailRound rail_round(int number, int num_rounds, int64_t operation, int64_t row_bytes, int64_t flow_bytes,
                            uintptr_t first_out, uintptr_t num_in) {
  RailRound round = {};
  round.number = number;
  round.num_rounds = num_rounds;
  round.operation = operation;
  round.row_bytes = row_bytes;
  round.flow_bytes = flow_bytes;
  round.first_out = reinterpret_cast<const int32_t*>(first_out);
  round.num_in = reinterpret_cast<const int32_t*>(num_in);
  return round;
}

inline RailRows rail_rows(const DepartingRows& rows, uintptr_t token) {
  MOE_EP_CHECK(rows.size() <= kRowKinds, rows.size(), " kinds of rows were given, but at most ", kRowKinds, " travel.");
  RailRows out = {};
  out.token = reinterpret_cast<const int32_t*>(token);
  for (size_t kind = 0; kind < rows.size(); ++kind) {
    out.x[kind] = reinterpret_cast<const char*>(rows[kind][0]);
    out.stride_bytes[kind] = rows[kind][1];
    out.bytes[kind] = rows[kind][2];
  }
  return out;
}

inline void check_round(const Rail& rail, const RailRound& round) {
  MOE_EP_CHECK(0 < round.flow_bytes && round.flow_bytes <= rail.flow_bytes && round.flow_bytes % 16 == 0,
               "a round has ", round.flow_bytes, " bytes a node, the rail has ", rail.flow_bytes, ".");
}

// The methods that all transports share.
template <typename Rail>
void bind_rail(pybind11::class_<Rail>& bound) {
  namespace py = pybind11;
  const py::call_guard<py::gil_scoped_release> no_gil;
  bound.def_property_readonly("block", [](const Rail& rail) { return reinterpret_cast<uintptr_t>(rail.rail().block); });
  bound.def_property_readonly("block_bytes", [](const Rail& rail) { return rail_block_bytes(rail.rail()); });
  bound.def("inbox", [](const Rail& rail, int slot) { return rail_inbox(rail.rail(), slot); });
  bound.def("outbox", [](const Rail& rail, int slot) { return rail_outbox(rail.rail(), slot); });
  bound.def_property_readonly("flow_bytes", [](const Rail& rail) { return rail.rail().flow_bytes; });
  bound.def("watch", &Rail::watch, py::kw_only(), py::arg("node_state"), py::arg("record"), py::arg("timeout_secs"));
  bound.def("sent_bytes", &Rail::sent_bytes, no_gil);
  bound.def("begin_generation", &Rail::begin_generation, py::arg("generation"));
  bound.def(
      "open",
      [](Rail& rail, const std::string& call, uintptr_t stream) {
        Call opening;
        MOE_EP_CHECK(call.size() == sizeof(opening), "a call has ", call.size(), " bytes, not ", sizeof(opening),
                     ": both extensions must be of one build.");
        std::memcpy(&opening, call.data(), sizeof(opening));
        const OnDevice on_device(rail.device());
        rail.open(opening, reinterpret_cast<cudaStream_t>(stream));
      },
      no_gil, py::arg("call"), py::arg("stream"));
  bound.def(
      "send",
      [](Rail& rail, const RailRound& round, const DepartingRows& rows, uintptr_t token, int num_sms,
         uintptr_t stream) {
        check_round(rail.rail(), round);
        const OnDevice on_device(rail.device());
        rail.send(round, rail_rows(rows, token), num_sms, reinterpret_cast<cudaStream_t>(stream));
      },
      no_gil, py::arg("round"), py::arg("rows"), py::arg("token"), py::arg("num_sms"), py::arg("stream"));
  const auto def_step = [&](const char* name, void (Rail::*step)(const RailRound&, cudaStream_t)) {
    bound.def(
        name,
        [step](Rail& rail, const RailRound& round, uintptr_t stream) {
          const OnDevice on_device(rail.device());
          (rail.*step)(round, reinterpret_cast<cudaStream_t>(stream));
        },
        no_gil, py::arg("round"), py::arg("stream"));
  };
  def_step("wait_free", &Rail::wait_free);
  def_step("wait", &Rail::wait);
  def_step("take", &Rail::take);
  bound.def(
      "settle",
      [](Rail& rail, uintptr_t stream) {
        const OnDevice on_device(rail.device());
        rail.settle(reinterpret_cast<cudaStream_t>(stream));
      },
      no_gil, py::arg("stream"));
}

inline void bind_rail_round(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<RailRound>(module, "RailRound", py::module_local())
      .def(py::init(&rail_round), py::kw_only(), py::arg("number"), py::arg("num_rounds"), py::arg("operation"),
           py::arg("row_bytes"), py::arg("flow_bytes"), py::arg("first_out"), py::arg("num_in"));
}

}  // namespace moe_ep
