// How low latency looks from Python, whatever its hop: moe_ep._C.LowLatency and moe_ep._C_nvshmem.NvshmemLowLatency.
// The contracts are in csrc/low_latency/low_latency.h; moe_ep/backends/node_low_latency.py calls them.
#pragma once

#include <algorithm>
#include <string>

#include "bindings/binding.h"
#include "low_latency/memory.h"

namespace moe_ep {

inline RowKind low_latency_kind(const std::string& name) {
  switch (row_type_from(name)) {
    case RowType::kBFloat16:
      return RowKind::kBFloat16;
    case RowType::kFloat16:
      return RowKind::kFloat16;
    case RowType::kFloat32:
      return RowKind::kFloat32;
  }
  return RowKind::kFloat32;
}

inline LowLatencyShape make_shape(int hidden, int row_bytes, int num_topk, int num_experts, int most_local,
                                  int max_tokens) {
  MOE_EP_CHECK(1 <= num_topk && num_topk <= kMaxTopk, "a token has K = ", num_topk, " slots, the limit is ", kMaxTopk,
               ": name fewer experts a token.");
  MOE_EP_CHECK(static_cast<int64_t>(max_tokens) * num_topk <= kMaxPairs, "M * K is ",
               static_cast<int64_t>(max_tokens) * num_topk, ", the limit is ", kMaxPairs, ": lower M.");
  return {hidden, row_bytes, num_topk, num_experts, most_local, max_tokens};
}

// Bytes of a row as it travels.
inline int64_t travelling_bytes(int64_t num_bytes) { return (num_bytes + 127) / 128 * 128; }

inline LowLatencyDispatch make_dispatch(const LowLatencyShape& shape, int format, int elem_bytes, int64_t num_tokens,
                                        int num_local, uintptr_t x, uintptr_t ids, int id_bytes, uintptr_t owner,
                                        uintptr_t local_idx, uintptr_t rows, uintptr_t scales, uintptr_t recv_count,
                                        uintptr_t layout_range, uintptr_t src_info, uintptr_t cumulative,
                                        uintptr_t row_places, uintptr_t slot_rank) {
  return {shape,
          static_cast<LowLatencyFormat>(format),
          elem_bytes,
          num_tokens,
          num_local,
          pointer_from<const void>(x),
          pointer_from<const void>(ids),
          id_bytes,
          pointer_from<const int32_t>(owner),
          pointer_from<const int32_t>(local_idx),
          pointer_from<char>(rows),
          pointer_from<void>(scales),
          pointer_from<int32_t>(recv_count),
          pointer_from<int64_t>(layout_range),
          pointer_from<int32_t>(src_info),
          pointer_from<int32_t>(cumulative),
          pointer_from<int32_t>(row_places),
          pointer_from<int32_t>(slot_rank)};
}

inline LowLatencyCombine make_combine(const LowLatencyShape& shape, int64_t num_tokens, uintptr_t rows,
                                      uintptr_t row_places, uintptr_t slot_rank, uintptr_t weights, uintptr_t out) {
  return {shape,
          num_tokens,
          pointer_from<const char>(rows),
          pointer_from<const int32_t>(row_places),
          pointer_from<const int32_t>(slot_rank),
          pointer_from<const float>(weights),
          pointer_from<char>(out)};
}

// What every launch is given.
struct LowLatencyLaunching {
  uintptr_t stream;
  int num_blocks;
  bool sends;
  bool receives;
  uintptr_t mask;
  uintptr_t ticket;
  uintptr_t stats;
  uint32_t print;
  bool enable_shrink;
};

inline LowLatencyCall with(LowLatencyCall call, const LowLatencyLaunching& launching) {
  call.mask = pointer_from<int32_t>(launching.mask);
  call.ticket = pointer_from<int64_t>(launching.ticket);
  call.stats = pointer_from<uint64_t>(launching.stats);
  call.print = launching.print;
  call.enable_shrink = launching.enable_shrink;
  call.sends = launching.sends;
  call.receives = launching.receives;
  return call;
}

inline int row_units_of(const LowLatencyShape& shape, RowKind kind) {
  return shape.hidden * (kind == RowKind::kFloat32 ? 4 : 2) / kUnitBytes;
}

// (words, bytes) of a slot.
inline pybind11::tuple low_latency_needs(int size, const LowLatencyShape& shape, const LowLatencyShape& combined,
                                         const std::string& dtype) {
  const RowKind kind = low_latency_kind(dtype);
  const int row_units = row_units_of(combined, kind);
  return pybind11::make_tuple(std::max(dispatch_words(shape, size), combine_words(combined, size, row_units)),
                              std::max(bytes_of_rows(shape, size), bytes_of_rows(combined, size)));
}

template <typename Memory>
void low_latency_dispatch(const Memory& memory, const LowLatencyLaunching& launching, int64_t operation,
                          const LowLatencyDispatch& input) {
  const OnDevice on_device(memory.device());
  const int size = memory.size();
  const LowLatencyCall call =
      with(memory.call(operation, dispatch_words(input.shape, size), bytes_of_rows(input.shape, size)), launching);
  launch_low_latency_dispatch<typename Memory::Hop>(call, input, launching.num_blocks, stream_from(launching.stream));
}

template <typename Memory>
void low_latency_combine(const Memory& memory, const LowLatencyLaunching& launching, int64_t operation,
                         const LowLatencyCombine& input, const std::string& dtype) {
  const OnDevice on_device(memory.device());
  const RowKind kind = low_latency_kind(dtype);
  const int64_t num_words = combine_words(input.shape, memory.size(), row_units_of(input.shape, kind));
  const LowLatencyCall call =
      with(memory.call(operation, num_words, bytes_of_rows(input.shape, memory.size())), launching);
  launch_low_latency_combine<typename Memory::Hop>(call, input, kind, launching.num_blocks,
                                                   stream_from(launching.stream));
}

template <typename Memory>
void low_latency_refuse(const Memory& memory, const LowLatencyLaunching& launching, int64_t operation) {
  const OnDevice on_device(memory.device());
  launch_low_latency_refusal<typename Memory::Hop>(with(memory.call(operation, 0, 0), launching),
                                                   stream_from(launching.stream));
}

template <typename Memory>
void low_latency_drain(const Memory& memory, const LowLatencyLaunching& launching) {
  const OnDevice on_device(memory.device());
  launch_low_latency_drain<typename Memory::Hop>(with(memory.call(0, 0, 0), launching), stream_from(launching.stream));
}

// What is handed to the calls; each extension has classes of its own.
inline void bind_low_latency_calls(pybind11::module_& module) {
  namespace py = pybind11;
  const py::module_local local;
  module.attr("low_latency_max_ranks") = kMaxLowLatencyRanks;
  module.attr("low_latency_max_pairs") = kMaxPairs;
  module.attr("low_latency_max_scales") = kMaxLowLatencyScales;
  module.attr("low_latency_max_counts") = kMaxLowLatencyCounts;
  module.def("low_latency_row_bytes", &travelling_bytes, py::arg("num_bytes"));
  module.def("low_latency_needs", &low_latency_needs, py::arg("size"), py::arg("shape"), py::arg("combined"),
             py::arg("dtype"));

  py::class_<LowLatencyShape>(module, "LowLatencyShape", local)
      .def(py::init(&make_shape), py::kw_only(), py::arg("hidden"), py::arg("row_bytes"), py::arg("num_topk"),
           py::arg("num_experts"), py::arg("most_local"), py::arg("max_tokens"));

  py::class_<LowLatencyDispatch>(module, "LowLatencyDispatch", local)
      .def(py::init(&make_dispatch), py::kw_only(), py::arg("shape"), py::arg("format"), py::arg("elem_bytes"),
           py::arg("num_tokens"), py::arg("num_local"), py::arg("x"), py::arg("ids"), py::arg("id_bytes"),
           py::arg("owner"), py::arg("local_idx"), py::arg("rows"), py::arg("scales"), py::arg("recv_count"),
           py::arg("layout_range"), py::arg("src_info"), py::arg("cumulative"), py::arg("row_places"),
           py::arg("slot_rank"));

  py::class_<LowLatencyCombine>(module, "LowLatencyCombine", local)
      .def(py::init(&make_combine), py::kw_only(), py::arg("shape"), py::arg("num_tokens"), py::arg("rows"),
           py::arg("row_places"), py::arg("slot_rank"), py::arg("weights"), py::arg("out"));

  py::class_<LowLatencyLaunching>(module, "LowLatencyLaunch", local)
      .def(py::init([](uintptr_t stream, int num_blocks, bool sends, bool receives, uintptr_t mask, uintptr_t ticket,
                       uintptr_t stats, uint32_t print, bool enable_shrink) {
             return LowLatencyLaunching{stream, num_blocks, sends, receives, mask, ticket, stats, print, enable_shrink};
           }),
           py::kw_only(), py::arg("stream"), py::arg("num_blocks"), py::arg("sends"), py::arg("receives"),
           py::arg("mask"), py::arg("ticket"), py::arg("stats"), py::arg("print"), py::arg("enable_shrink"));
}

// The methods that all hops share.
template <typename Memory>
void bind_low_latency_memory(pybind11::class_<Memory>& bound) {
  namespace py = pybind11;
  const NoGil no_gil;
  bound.def("clear", &Memory::clear)
      .def("begin", &Memory::begin, py::arg("generation"))
      .def_property_readonly("words_a_slot", &Memory::words_a_slot)
      .def_property_readonly("bytes_a_slot", &Memory::bytes_a_slot)
      .def("dispatch", &low_latency_dispatch<Memory>, no_gil)
      .def("combine", &low_latency_combine<Memory>, no_gil)
      .def("refuse", &low_latency_refuse<Memory>, no_gil)
      .def("drain", &low_latency_drain<Memory>, no_gil);
}

}  // namespace moe_ep
