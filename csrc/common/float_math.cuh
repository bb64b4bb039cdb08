// Elements to float32 and back, and the sigmoid of SwiGLU, as the kernels that compute element by element share them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace moe_ep {

__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(float value) { return value; }

template <typename Elem>
__device__ inline Elem from_float(float value) {
  if constexpr (sizeof(Elem) == 4) {
    return value;
  } else if constexpr (std::is_same_v<Elem, __half>) {
    return __float2half_rn(value);
  } else {
    return __float2bfloat16_rn(value);
  }
}

// For results of 2 bytes the fast exponential and division do: their relative error, below 1e-5 for any gate whose
// sigmoid is not rounded to 0 or 1, is far under half a unit of float16 (4.9e-4).
template <typename Elem>
__device__ inline float sigmoid(float gate) {
  if constexpr (sizeof(Elem) == 4) {
    return 1.0f / (1.0f + expf(-gate));
  } else {
    return __fdividef(1.0f, 1.0f + __expf(-gate));
  }
}

}  // namespace moe_ep
