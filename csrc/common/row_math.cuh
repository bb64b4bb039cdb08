// Arithmetic on 16 bytes of a row: widen, multiply, add, round back. Float32 for 16-bit and 32-bit rows, float64 for
// float64. A product is rounded before it is added (no fused multiply-add), as moe_ep/ordered_sum.py does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "common/row_kind.h"

namespace moe_ep {

__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double sum(double a, double b) { return __dadd_rn(a, b); }

// The elements of 16 bytes in the type of the sums, and back. The single conversions of bfloat16 run at a quarter of
// the rate of additions and would set the pace; a shift and the packed conversion do not.
template <typename Elem>
struct Widening;

template <>
struct Widening<__nv_bfloat16> {
  using Wide = float;
  static constexpr int kElems = 8;
  __device__ static void widen(const uint4& bits, float (&out)[kElems]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  __device__ static uint32_t narrow_two(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
  __device__ static uint4 narrow(const float (&in)[kElems]) {
    return make_uint4(narrow_two(in[0], in[1]), narrow_two(in[2], in[3]), narrow_two(in[4], in[5]),
                      narrow_two(in[6], in[7]));
  }
};

template <>
struct Widening<__half> {
  using Wide = float;
  static constexpr int kElems = 8;
  __device__ static void widen(const uint4& bits, float (&out)[kElems]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __half2 pair;
      memcpy(&pair, &words[i], sizeof(pair));
      const float2 two = __half22float2(pair);
      out[2 * i] = two.x;
      out[2 * i + 1] = two.y;
    }
  }
  __device__ static uint32_t narrow_two(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
  __device__ static uint4 narrow(const float (&in)[kElems]) {
    return make_uint4(narrow_two(in[0], in[1]), narrow_two(in[2], in[3]), narrow_two(in[4], in[5]),
                      narrow_two(in[6], in[7]));
  }
};

template <>
struct Widening<float> {
  using Wide = float;
  static constexpr int kElems = 4;
  __device__ static void widen(const uint4& bits, float (&out)[kElems]) {
    out[0] = __uint_as_float(bits.x);
    out[1] = __uint_as_float(bits.y);
    out[2] = __uint_as_float(bits.z);
    out[3] = __uint_as_float(bits.w);
  }
  __device__ static uint4 narrow(const float (&in)[kElems]) {
    return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]));
  }
};

template <>
struct Widening<double> {
  using Wide = double;
  static constexpr int kElems = 2;
  __device__ static void widen(const uint4& bits, double (&out)[kElems]) {
    out[0] = __hiloint2double(bits.y, bits.x);
    out[1] = __hiloint2double(bits.w, bits.z);
  }
  __device__ static uint4 narrow(const double (&in)[kElems]) {
    return make_uint4(__double2loint(in[0]), __double2hiint(in[0]), __double2loint(in[1]), __double2hiint(in[1]));
  }
};

template <typename Elem>
struct RowMath : Widening<Elem> {
  using Wide = typename Widening<Elem>::Wide;
  using Widening<Elem>::kElems;
  using Widening<Elem>::widen;

  __device__ static uint4 scale(const Wide (&row)[kElems], Wide weight) {
    Wide values[kElems];
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      values[i] = product(row[i], weight);
    }
    return rounded(values);
  }

  __device__ static uint4 scale(uint4 row, Wide weight) {
    Wide values[kElems];
    product_of(row, weight, values);
    return rounded(values);
  }

  __device__ static Wide dot(const Wide (&left)[kElems], uint4 b) {
    Wide right[kElems];
    widen(b, right);
    Wide total = 0;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      total += left[i] * right[i];
    }
    return total;
  }

  __device__ static Wide dot(uint4 a, uint4 b) {
    Wide left[kElems];
    widen(a, left);
    return dot(left, b);
  }

  __device__ static void product_of(uint4 row, Wide weight, Wide (&out)[kElems]) {
    widen(row, out);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      out[i] = product(out[i], weight);
    }
  }

  // What a sum begins with: -0, to which the first term adds as it is. To +0 it would not, where it is -0.
  __device__ static void begin(Wide (&total)[kElems]) {
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      total[i] = -Wide(0);
    }
  }

  __device__ static void add(Wide (&total)[kElems], uint4 term) {
    Wide values[kElems];
    widen(term, values);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      total[i] = sum(total[i], values[i]);
    }
  }

  __device__ static void add_product(Wide (&total)[kElems], uint4 term, Wide weight) {
    Wide values[kElems];
    product_of(term, weight, values);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      total[i] = sum(total[i], values[i]);
    }
  }

  __device__ static uint4 rounded(const Wide (&total)[kElems]) { return Widening<Elem>::narrow(total); }
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
