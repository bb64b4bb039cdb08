// moe_ep._C.Exchange: the intranode kernels with the memory they share. The contracts are in the headers of the launch
// functions; moe_ep/backends/intranode.py calls them.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/binding.h"
#include "bindings/record.h"
#include "bindings/row_names.h"
#include "exchange/host.h"
#include "intranode/combine.h"
#include "intranode/move.h"
#include "intranode/plan.h"
#include "intranode/rounds.h"
#include "intranode/small.h"

namespace py = pybind11;

namespace moe_ep {
namespace {

Number number_kind(const std::string& name) {
  if (name == "float32") {
    return Number::kFloat32;
  }
  if (name == "float64") {
    return Number::kFloat64;
  }
  if (name == "int32") {
    return Number::kInt32;
  }
  if (name == "int64") {
    return Number::kInt64;
  }
  if (name == "bfloat16") {
    return Number::kBFloat16;
  }
  MOE_EP_CHECK(name == "float16", "numbers have dtype ", name, ", which cannot be summed here: convert them.");
  return Number::kFloat16;
}

// The header of a call as Python packs it: kHeaderWords int64.
void read_header(const std::string& header, int64_t (&words)[kHeaderWords]) {
  MOE_EP_CHECK(header.size() == sizeof(words), "a header has ", header.size(), " bytes, not ", sizeof(words), ".");
  std::memcpy(words, header.data(), sizeof(words));
}

Call call_of(const Exchange& exchange, const std::string& header, int num_match, uint64_t question) {
  int64_t words[kHeaderWords];
  read_header(header, words);
  return exchange.call(words, num_match, question);
}

// Launches on the device and the stream of the exchange: behind what `caller` has been given so far, and `caller`
// behind them where it joins. Whether a CUDA graph captures them.
template <typename Launch>
bool launch_between(const Exchange& exchange, uintptr_t caller, bool joins, const Launch& launch) {
  const OnDevice on_device(exchange.device());
  const bool is_captured = exchange.follow(stream_from(caller));
  launch(exchange.stream());
  if (joins) {
    exchange.lead(stream_from(caller));
  }
  return is_captured;
}

PlanInput plan_input(uintptr_t ids, int id_bytes, int64_t id_stride_token, int64_t id_stride_slot, uintptr_t weights,
                     int weight_bytes, int64_t weight_stride_token, int64_t weight_stride_slot, int64_t num_tokens,
                     int num_topk, int num_experts, int num_local, uintptr_t owner, uintptr_t local_idx,
                     int64_t alignment, bool expert_major, int64_t max_rows, uintptr_t chunk_counts, uintptr_t geometry,
                     uintptr_t expert_counts, uintptr_t expert_offsets) {
  PlanInput in;
  in.ids = pointer_from<const void>(ids);
  in.id_bytes = id_bytes;
  in.id_stride_token = id_stride_token;
  in.id_stride_slot = id_stride_slot;
  in.weights = pointer_from<const void>(weights);
  in.weight_bytes = weight_bytes;
  in.weight_stride_token = weight_stride_token;
  in.weight_stride_slot = weight_stride_slot;
  in.num_tokens = num_tokens;
  in.num_topk = num_topk;
  in.num_experts = num_experts;
  in.num_local = num_local;
  in.owner = pointer_from<const int32_t>(owner);
  in.local_idx = pointer_from<const int32_t>(local_idx);
  in.alignment = alignment;
  in.expert_major = expert_major;
  in.max_rows = max_rows;
  in.chunk_counts = pointer_from<int32_t>(chunk_counts);
  in.geometry = pointer_from<int32_t>(geometry);
  in.expert_counts = pointer_from<int32_t>(expert_counts);
  in.expert_offsets = pointer_from<int32_t>(expert_offsets);
  return in;
}

PlanOutput plan_output(bool only_if_enough, int64_t capacity, int64_t num_rows, uintptr_t row_idx,
                       uintptr_t row_weights, uintptr_t recv_token, uintptr_t pair_row, uintptr_t row_pair,
                       uintptr_t token_row, uintptr_t slot_rank, uintptr_t send_token) {
  return {only_if_enough,
          capacity,
          num_rows,
          pointer_from<void>(row_idx),
          pointer_from<void>(row_weights),
          pointer_from<int32_t>(recv_token),
          pointer_from<int32_t>(pair_row),
          pointer_from<int64_t>(row_pair),
          pointer_from<int32_t>(token_row),
          pointer_from<int64_t>(slot_rank),
          pointer_from<int64_t>(send_token)};
}

// Both kernels of a plan; the first one alone where there is no output yet.
bool plan(const Exchange& exchange, uintptr_t caller, bool joins, int num_sms, const PlanInput& input,
          const PlanOutput* output, const std::string& header, int num_match, uint64_t question) {
  const Call counts = call_of(exchange, header, num_match, question);
  return launch_between(exchange, caller, joins, [&](cudaStream_t stream) {
    launch_plan_count(counts, input, num_sms, stream);
    if (output != nullptr) {
      Call fills = counts;
      fills.question = 0;
      launch_plan_fill(fills, input, *output, num_sms, stream);
    }
  });
}

bool plan_fill(const Exchange& exchange, uintptr_t caller, bool joins, int num_sms, const PlanInput& input,
               const PlanOutput& output, const std::string& header) {
  const Call call = call_of(exchange, header, 0, 0);
  return launch_between(exchange, caller, joins,
                        [&](cudaStream_t stream) { launch_plan_fill(call, input, output, num_sms, stream); });
}

// What the calls along one handle have in common; moe_ep/backends/node_route.py makes it once a handle.
struct Route {
  int64_t header[kHeaderWords];
  int num_match;
  int64_t num_tokens;        // T
  int64_t num_rows;          // R
  int64_t num_compact_rows;  // S
  int num_topk;
  int num_local;
  bool expert_major;
  const int32_t* recv_token;
  const int32_t* pair_row;
  const int32_t* token_row;
  const int64_t* slot_rank;
  const int32_t* geometry;
};

Route make_route(const std::string& header, int num_match, int64_t uid, int64_t num_tokens, int64_t num_rows,
                 int64_t num_compact_rows, int num_topk, int num_local, bool expert_major, uintptr_t recv_token,
                 uintptr_t pair_row, uintptr_t token_row, uintptr_t slot_rank, uintptr_t geometry) {
  Route route;
  read_header(header, route.header);
  route.header[kHandleWord] = uid;
  route.num_match = num_match;
  route.num_tokens = num_tokens;
  route.num_rows = num_rows;
  route.num_compact_rows = num_compact_rows;
  route.num_topk = num_topk;
  route.num_local = num_local;
  route.expert_major = expert_major;
  route.recv_token = pointer_from<const int32_t>(recv_token);
  route.pair_row = pointer_from<const int32_t>(pair_row);
  route.token_row = pointer_from<const int32_t>(token_row);
  route.slot_rank = pointer_from<const int64_t>(slot_rank);
  route.geometry = pointer_from<const int32_t>(geometry);
  return route;
}

// Of a route that was made before the counts were known.
void set_rows(Route& route, int64_t num_rows, int64_t num_compact_rows) {
  route.num_rows = num_rows;
  route.num_compact_rows = num_compact_rows;
}

// Where rows lie that peers read in place: number of the block, then offset and stride of each kind; empty for none.
using Places = std::vector<int64_t>;

// What a call along a route says beside the words that the route knows.
struct Said {
  int operation;
  int64_t hidden;
  int dtype;
  int64_t need_bytes;
  int weights_dtype = -1;
  bool exact = false;
  int64_t first_offset = 0, second_offset = 0;
  int num_rounds = 1;
};

Call call_along(const Exchange& exchange, const Route& route, const Said& said, const Places& places) {
  int64_t header[kHeaderWords];
  std::memcpy(header, route.header, sizeof(header));
  header[kOperationWord] = said.operation;
  header[kHiddenWord] = said.hidden;
  header[kDtypeWord] = said.dtype;
  header[kWeightsDtypeWord] = said.weights_dtype;
  header[kExactWord] = said.exact;
  header[kRoundsWord] = said.num_rounds;
  header[kNeedWord] = said.need_bytes;
  header[kFirstOffsetWord] = said.first_offset;
  header[kSecondOffsetWord] = said.second_offset;
  std::copy(places.begin(), places.end(), header + kRegisteredWord);
  return exchange.call(header, route.num_match, 0);
}

// One kind of rows: (x, stride_bytes, row_bytes, out, poison, padding).
using PyRows = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, uint64_t, uint64_t>;

bool move(const Exchange& exchange, uintptr_t caller, bool joins, int num_sms, const Route& route, int operation,
          int64_t hidden, int dtype, int64_t need_bytes, const Places& places, const std::vector<PyRows>& rows,
          const std::string& dtype_name, uintptr_t weights, uintptr_t made_rows, uintptr_t grad_weights) {
  const Call call = call_along(exchange, route, {operation, hidden, dtype, need_bytes}, places);
  MoveInput input;
  for (size_t kind = 0; kind < kRowKinds; ++kind) {
    const PyRows kind_rows = kind < rows.size() ? rows[kind] : PyRows{};
    input.rows[kind] = {
        pointer_from<const char>(std::get<0>(kind_rows)), std::get<1>(kind_rows), std::get<2>(kind_rows),
        pointer_from<char>(std::get<3>(kind_rows)),       std::get<4>(kind_rows), std::get<5>(kind_rows)};
  }
  input.num_tokens = route.num_tokens;
  input.recv_token = route.recv_token;
  input.token_row = route.token_row;
  input.pair_row = route.pair_row;
  input.num_topk = route.num_topk;
  input.num_local = route.num_local;
  input.expert_major = route.expert_major;
  input.geometry = route.geometry;
  input.num_rows = route.num_rows;
  input.is_registered = !places.empty();
  const bool bulk = exchange.uses_bulk_copies();
  return launch_between(exchange, caller, joins, [&](cudaStream_t stream) {
    if (weights == 0) {
      (bulk ? launch_move_bulk : launch_move)(call, input, num_sms, stream);
      return;
    }
    const MoveWeights with = {pointer_from<const void>(weights), pointer_from<const char>(made_rows),
                              pointer_from<void>(grad_weights)};
    const auto launch = bulk && route.num_topk < 32 ? launch_move_weighted_bulk : launch_move_weighted;
    launch(call, input, with, row_kind(dtype_name), num_sms, stream);
  });
}

// One call, or `num_rounds` of them where that is more than 1: with `slot_rows` that a slot holds, and their
// geometries, [num_rounds, round_geometry_length], which are made here.
bool combine(const Exchange& exchange, uintptr_t caller, bool joins, int num_sms, const Route& route, int operation,
             int64_t hidden, int dtype, int64_t need_bytes, const Places& places, uintptr_t rows, int64_t row_bytes,
             uintptr_t y, uint64_t poison, const std::string& dtype_name, uintptr_t bias_0, uintptr_t bias_1,
             uintptr_t weights, bool is_weighted, int weights_dtype, bool exact, int64_t pairs_offset,
             int64_t weights_offset, int num_rounds, int64_t slot_rows, uintptr_t rounds) {
  const Said said = {operation, hidden,       dtype,          need_bytes, weights_dtype,
                     exact,     pairs_offset, weights_offset, num_rounds};
  const Call call = call_along(exchange, route, said, places);
  const CombineInput input = {pointer_from<const char>(rows),
                              pointer_from<const void>(weights),
                              {pointer_from<const char>(bias_0), pointer_from<const char>(bias_1)},
                              route.num_tokens,
                              row_bytes,
                              route.pair_row,
                              route.token_row,
                              route.num_topk,
                              route.num_local,
                              route.expert_major,
                              route.geometry,
                              !places.empty(),
                              pointer_from<char>(y),
                              poison};
  const RowKind kind = row_kind(dtype_name);
  const bool bulk = exchange.uses_bulk_copies() && (!route.expert_major || route.num_topk <= 32);
  return launch_between(exchange, caller, joins, [&](cudaStream_t stream) {
    if (exact) {
      launch_combine_exact(call, {input, route.slot_rank, route.num_rows, is_weighted, route.num_compact_rows}, kind,
                           num_sms, stream);
      return;
    }
    const auto launch = bulk ? launch_combine_bulk : launch_combine;
    if (num_rounds == 1) {
      launch(call, input, kind, num_sms, stream);
      return;
    }
    launch_rounds(launch, call, input,
                  {exchange.world().rank, exchange.size(), route.geometry, route.recv_token, route.token_row, slot_rows,
                   num_rounds, pointer_from<int32_t>(rounds)},
                  kind, num_sms, stream);
  });
}

bool numbers_home(const Exchange& exchange, uintptr_t caller, bool joins, int num_sms, const Route& route,
                  int operation, int dtype, int64_t need_bytes, uintptr_t numbers, int64_t num_compact_rows, bool sums,
                  uintptr_t out, const std::string& dtype_name) {
  const Call call = call_along(exchange, route, {operation, route.num_topk, dtype, need_bytes}, {});
  const NumbersInput input = {pointer_from<const void>(numbers),
                              route.expert_major ? route.pair_row : nullptr,
                              route.token_row,
                              route.slot_rank,
                              num_compact_rows,
                              route.num_tokens,
                              route.num_topk,
                              route.geometry,
                              sums,
                              pointer_from<void>(out)};
  return launch_between(exchange, caller, joins, [&](cudaStream_t stream) {
    launch_numbers_home(call, input, number_kind(dtype_name), num_sms, stream);
  });
}

bool all_reduce(const Exchange& exchange, uintptr_t caller, bool joins, int num_sms, const std::string& header,
                int num_match, uint64_t question, uintptr_t in, uintptr_t out, int64_t count,
                const std::string& dtype_name) {
  const Call call = call_of(exchange, header, num_match, question);
  return launch_between(exchange, caller, joins, [&](cudaStream_t stream) {
    launch_all_reduce(call, pointer_from<const void>(in), pointer_from<void>(out), count, number_kind(dtype_name),
                      num_sms, stream);
  });
}

bool header_only(const Exchange& exchange, uintptr_t caller, bool joins, const std::string& header, int num_match,
                 uint64_t question) {
  const Call call = call_of(exchange, header, num_match, question);
  return launch_between(exchange, caller, joins, [&](cudaStream_t stream) { launch_header_only(call, stream); });
}

// As the `open` of a rail takes it.
py::bytes opening(const Exchange& exchange, const std::string& header, int num_match, uint64_t question) {
  const Call call = call_of(exchange, header, num_match, question);
  return py::bytes(reinterpret_cast<const char*>(&call), sizeof(call));
}

bool done_only(const Exchange& exchange, uintptr_t caller, bool joins, const std::string& header) {
  const Call call = call_of(exchange, header, 0, 0);
  return launch_between(exchange, caller, joins, [&](cudaStream_t stream) { launch_done_only(call, stream); });
}

void drain(const Exchange& exchange, const std::string& header) {
  const OnDevice on_device(exchange.device());
  launch_drain(call_of(exchange, header, 0, 0), exchange.stream());
}

// Orders `caller` behind what the stream of the exchange has been given so far.
void join(const Exchange& exchange, uintptr_t caller) {
  const OnDevice on_device(exchange.device());
  exchange.lead(stream_from(caller));
}

}  // namespace

void bind_intranode(py::module_& module) {
  const NoGil no_gil;
  module.def("pci_bus_id", &pci_bus_id);
  module.def("has_bulk_copies", &has_bulk_copies);
  module.def("can_reach", &can_reach, py::arg("peer_pci_bus_id"));
  module.def("geometry_length", &Geometry::length, py::arg("size"), py::arg("num_local"));
  module.def("round_geometry_length", &RoundGeometry::length, py::arg("size"));
  module.def("chunk_tokens", &chunk_tokens, py::arg("num_tokens"));
  module.attr("max_ranks") = kMaxRanks;
  module.attr("max_chunks") = kMaxChunks;
  module.attr("max_local_experts") = kMaxLocalExperts;

  py::class_<PlanInput>(module, "PlanInput")
      .def(py::init(&plan_input), py::kw_only(), py::arg("ids"), py::arg("id_bytes"), py::arg("id_stride_token"),
           py::arg("id_stride_slot"), py::arg("weights"), py::arg("weight_bytes"), py::arg("weight_stride_token"),
           py::arg("weight_stride_slot"), py::arg("num_tokens"), py::arg("num_topk"), py::arg("num_experts"),
           py::arg("num_local"), py::arg("owner"), py::arg("local_idx"), py::arg("alignment"), py::arg("expert_major"),
           py::arg("max_rows"), py::arg("chunk_counts"), py::arg("geometry"), py::arg("expert_counts"),
           py::arg("expert_offsets"));

  py::class_<PlanOutput>(module, "PlanOutput")
      .def(py::init(&plan_output), py::kw_only(), py::arg("only_if_enough"), py::arg("capacity"), py::arg("num_rows"),
           py::arg("row_idx"), py::arg("row_weights"), py::arg("recv_token"), py::arg("pair_row"), py::arg("row_pair"),
           py::arg("token_row"), py::arg("slot_rank"), py::arg("send_token"));

  py::class_<Route>(module, "Route")
      .def(py::init(&make_route), py::kw_only(), py::arg("header"), py::arg("num_match"), py::arg("uid"),
           py::arg("num_tokens"), py::arg("num_rows"), py::arg("num_compact_rows"), py::arg("num_topk"),
           py::arg("num_local"), py::arg("expert_major"), py::arg("recv_token"), py::arg("pair_row"),
           py::arg("token_row"), py::arg("slot_rank"), py::arg("geometry"))
      .def("set_rows", &set_rows);

  py::class_<Exchange> bound(module, "Exchange");
  bind_record(bound);
  bound.def(py::init<int, int, double>(), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("timeout_secs"))
      .def("export_control", [](const Exchange& self) { return py::bytes(self.export_control()); })
      .def("export_segment", [](const Exchange& self) { return py::bytes(self.export_segment()); })
      .def("open_control", &Exchange::open_control, py::arg("peer"), py::arg("exported"))
      .def("open_segment", &Exchange::open_segment, py::arg("peer"), py::arg("exported"))
      .def("allocate_block", &Exchange::allocate_block, py::arg("num_bytes"))
      .def("export_block", [](const Exchange& self) { return py::bytes(self.export_block()); })
      .def("open_block", &Exchange::open_block, py::arg("peer"), py::arg("exported"))
      .def("adopt_block", &Exchange::adopt_block, py::arg("addresses"))
      .def_property_readonly("state_address", &Exchange::state_address)
      .def_property_readonly("record_address", &Exchange::record_address)
      .def("close_segments", &Exchange::close_segments)
      .def("allocate_segment", &Exchange::allocate_segment, py::arg("slot_bytes"))
      .def_property_readonly("slot_bytes", &Exchange::slot_bytes)
      .def("begin_generation", &Exchange::begin_generation, py::arg("generation"))
      .def(
          "launch_on",
          [](Exchange& self, uintptr_t stream, bool bulk_copies) { self.launch_on(stream_from(stream), bulk_copies); },
          py::arg("stream"), py::arg("bulk_copies"))
      // Launches take their arguments by position, which costs a call half as much; NativeExchange names them.
      .def("join", &join)
      .def("plan", &plan, no_gil)
      .def("plan_fill", &plan_fill, no_gil)
      .def("move", &move, no_gil)
      .def("combine", &combine, no_gil)
      .def("numbers_home", &numbers_home, no_gil)
      .def("all_reduce", &all_reduce, no_gil)
      .def("header_only", &header_only, no_gil)
      .def("opening", &opening)
      .def("done_only", &done_only, no_gil)
      .def("drain", &drain, no_gil);
}

}  // namespace moe_ep
