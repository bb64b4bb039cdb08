// Arithmetic on 16 bytes of a row: widen, multiply, add, round back. Float32 for 16-bit and 32-bit rows, float64 for
// float64. A product is rounded before it is added (no fused multiply-add), as moe_ep/ordered_sum.py does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "row_kind.h"

namespace moe_ep {

__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }

__device__ inline void narrow(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }
__device__ inline void narrow(float value, __half* out) { *out = __float2half_rn(value); }
__device__ inline void narrow(float value, float* out) { *out = value; }
__device__ inline void narrow(double value, double* out) { *out = value; }

__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double sum(double a, double b) { return __dadd_rn(a, b); }

template <typename Elem>
struct RowMath {
  using Wide = decltype(widen(Elem()));
  static constexpr int kElems = 16 / sizeof(Elem);

  union Pack {
    uint4 bits;
    Elem elems[kElems];
    __device__ Pack() {}
  };

  __device__ static uint4 scale(uint4 row, Wide weight) {
    Pack pack;
    pack.bits = row;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      narrow(product(widen(pack.elems[i]), weight), &pack.elems[i]);
    }
    return pack.bits;
  }

  __device__ static Wide dot(uint4 a, uint4 b) {
    Pack left, right;
    left.bits = a;
    right.bits = b;
    Wide total = 0;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      total += widen(left.elems[i]) * widen(right.elems[i]);
    }
    return total;
  }

  // total += term, or total = term where it is the first.
  __device__ static void add(Wide (&total)[kElems], uint4 term, bool is_first) {
    Pack pack;
    pack.bits = term;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const Wide value = widen(pack.elems[i]);
      total[i] = is_first ? value : sum(total[i], value);
    }
  }

  __device__ static void add_product(Wide (&total)[kElems], uint4 term, Wide weight, bool is_first) {
    Pack pack;
    pack.bits = term;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const Wide value = product(widen(pack.elems[i]), weight);
      total[i] = is_first ? value : sum(total[i], value);
    }
  }

  __device__ static uint4 rounded(const Wide (&total)[kElems]) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      narrow(total[i], &pack.elems[i]);
    }
    return pack.bits;
  }
};

// `launch` with a value of the dtype.
template <typename Launch>
inline void for_kind(RowKind kind, Launch launch) {
  switch (kind) {
    case RowKind::kBFloat16:
      return launch(__nv_bfloat16());
    case RowKind::kFloat16:
      return launch(__half());
    case RowKind::kFloat32:
      return launch(float());
    case RowKind::kFloat64:
      return launch(double());
  }
}

}  // namespace moe_ep
