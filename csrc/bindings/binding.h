// What the binding files share: pointers and streams that arrive as integers, names of row types, the parts of
// moe_ep._C.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "common/check.h"
#include "common/row_type.h"

namespace moe_ep {

template <typename T>
T* pointer_from(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_from(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

inline RowType row_type_from(const std::string& name) {
  if (name == "bfloat16") {
    return RowType::kBFloat16;
  }
  if (name == "float16") {
    return RowType::kFloat16;
  }
  MOE_EP_CHECK(name == "float32", "x has dtype ", name,
               ", but bfloat16, float16 and float32 are supported: convert x.");
  return RowType::kFloat32;
}

// A launch may block while the driver loads a kernel: other Python threads go on meanwhile.
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// layer.cpp: the kernels of moe_ep.layers.
void bind_layer_kernels(pybind11::module_& module);

// fp8.cpp: the casts of rows and weights of the experts.
void bind_fp8_kernels(pybind11::module_& module);

// intranode.cpp: Exchange, the kernels of the intranode backend with the memory that they share.
void bind_intranode(pybind11::module_& module);

// low_latency.cpp: the low-latency kernels with the memory that they share.
void bind_low_latency(pybind11::module_& module);

// rail.cpp: what goes on between nodes.
void bind_rails(pybind11::module_& module);

}  // namespace moe_ep
