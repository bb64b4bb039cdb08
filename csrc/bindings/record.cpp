#include "bindings/record.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace moe_ep {
namespace {

// Of the newest answer: (verdict, epoch, bad slot, bad id). Of the newest plan: (compact rows, rows, x needs grad,
// weights need grad, tokens of each rank, rows from each to each, pairs from each).
py::tuple answer(Exchange& exchange) {
  HostRecord& record = exchange.record();
  const int size = exchange.size();
  py::tuple tokens(size), rows(size * size), pairs(size);
  for (int i = 0; i < size; ++i) {
    tokens[i] = record.rank_tokens[i];
    pairs[i] = record.recv_pairs[i];
    for (int j = 0; j < size; ++j) {
      rows[i * size + j] = record.rank_rows[i][j];
    }
  }
  return py::make_tuple(record.verdict, record.epoch, record.bad_slot, record.bad_id,
                        py::make_tuple(record.num_compact_rows, record.num_rows, record.x_needs_grad != 0,
                                       record.weights_need_grad != 0, tokens, rows, pairs));
}

// The answer to `question`, or None where `limit_secs` passed first.
py::object wait_answer(Exchange& exchange, uint64_t question, double limit_secs) {
  bool is_there = false;
  {
    const py::gil_scoped_release no_gil;
    is_there = exchange.wait_answer(question, limit_secs);
  }
  return is_there ? py::object(answer(exchange)) : py::none();
}

// (rows of the local experts, the same rounded up to `alignment`) of the newest plan.
py::tuple expert_counts(Exchange& exchange, int num_local, int64_t alignment) {
  HostRecord& record = exchange.record();
  py::list real(num_local), padded(num_local);
  for (int i = 0; i < num_local; ++i) {
    const int64_t count = record.expert_counts[i];
    real[i] = count;
    padded[i] = (count + alignment - 1) / alignment * alignment;
  }
  return py::make_tuple(real, padded);
}

// kHeaderWords int64 of each rank, of the newest refused call whose host waits.
py::bytes headers(Exchange& exchange, int size) {
  return py::bytes(reinterpret_cast<const char*>(exchange.record().headers),
                   size * sizeof(exchange.record().headers[0]));
}

// Name and eight numbers of every fault since the last call of this, which are forgotten; a timeout stays until the
// next generation. Refusals are as `Exchange::take_refusals` says.
std::vector<std::pair<std::string, std::vector<int64_t>>> take_faults(Exchange& exchange) {
  HostRecord& record = exchange.record();
  std::vector<std::pair<std::string, std::vector<int64_t>>> faults;
  const auto take = [&](const char* name, HostRecord::Fault& fault, bool stays) {
    int64_t values[8];
    if (Exchange::take_fault(&fault, values)) {
      faults.emplace_back(name, std::vector<int64_t>(values, values + 8));
      if (!stays) {
        __atomic_store_n(&fault.valid, 0, __ATOMIC_RELEASE);
      }
    }
  };
  take("timeout", record.timeout, true);
  if (auto refusals = exchange.take_refusals(); !refusals.second.empty()) {
    faults.push_back(std::move(refusals));
  }
  take("overflow", record.overflow, false);
  take("bad_idx", record.bad_idx, false);
  take("low_latency", record.low_latency, false);
  return faults;
}

bool has_fault(Exchange& exchange) {
  HostRecord& record = exchange.record();
  const auto valid = [](const HostRecord::Fault& fault) {
    return __atomic_load_n(&fault.valid, __ATOMIC_ACQUIRE) != 0;
  };
  return valid(record.timeout) || exchange.has_refusals() || valid(record.overflow) || valid(record.bad_idx) ||
         valid(record.low_latency);
}

}  // namespace

void bind_record(py::class_<Exchange>& bound) {
  bound.def("wait_answer", &wait_answer)
      .def("answer", &answer)
      .def("expert_counts", &expert_counts, py::arg("num_local"), py::arg("alignment"))
      .def("headers", &headers, py::arg("size"))
      .def("has_fault", &has_fault)
      .def("take_faults", &take_faults);
}

}  // namespace moe_ep
