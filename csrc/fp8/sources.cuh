// What csrc/fp8/tiles.cu casts: 4 neighbouring elements of a row at a time, read as they are or computed on the way.
// A source with kSums also adds up, of each row, what the elements give to the gradient of the row's weight.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "common/float_math.cuh"
#include "fp8/tiles.h"

namespace moe_ep {
namespace {

constexpr int kTile = 128;
constexpr int kWarpSize = 32;
constexpr int kPerLane = kTile / kWarpSize;  // neighbouring elements of a row

template <typename Elem>
struct alignas(sizeof(Elem) * kPerLane) Quad {
  Elem elems[kPerLane];
};

// An infinity becomes NaN, whose code it has, and which a maximum leaves out; every number stays, its sign included.
__device__ Quad<float> without_infinities(const Quad<float>& values) {
  Quad<float> result;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    result.elems[i] = __fmaf_rn(values.elems[i], 0.0f, values.elems[i]);
  }
  return result;
}

__device__ Quad<__nv_bfloat16> without_infinities(const Quad<__nv_bfloat16>& values) {
  static_assert(kPerLane == 4);
  const __nv_bfloat162 zero = __float2bfloat162_rn(0.0f);
  Quad<__nv_bfloat16> result;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    const __nv_bfloat162 pair = __halves2bfloat162(values.elems[i], values.elems[i + 1]);
    const __nv_bfloat162 finite = __hfma2(pair, zero, pair);
    result.elems[i] = __low2bfloat16(finite);
    result.elems[i + 1] = __high2bfloat16(finite);
  }
  return result;
}

__device__ float4 widened(const Quad<float>& values) { return *reinterpret_cast<const float4*>(&values); }

__device__ float4 widened(const Quad<__nv_bfloat16>& values) {  // a bfloat16 is the upper half of its float
  const uint2 pairs = *reinterpret_cast<const uint2*>(&values);
  return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xFFFF0000u),
                     __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xFFFF0000u));
}

template <typename Elem>
__device__ Quad<Elem> quad_at(const Elem* address) {
  return *reinterpret_cast<const Quad<Elem>*>(address);
}

template <typename Elem>
struct RowsSource {
  using Stored = Elem;
  static constexpr bool kSums = false;
  static constexpr int kBlocksPerSm = sizeof(Elem) == 4 ? 2 : 4;  // with as many next to nothing is spilled
  const Elem* x;
  int64_t width;

  __device__ Quad<Elem> load(const RowTile&, int64_t row, int64_t col) const { return quad_at(x + row * width + col); }
};

template <typename Elem>
struct SwigluSource {
  using Stored = Elem;
  static constexpr bool kSums = false;
  static constexpr int kBlocksPerSm = sizeof(Elem) == 4 ? 2 : 3;
  const Elem* x;
  const float* row_weights;
  int64_t width;

  __device__ Quad<Elem> load(const RowTile&, int64_t row, int64_t col) const {
    const Elem* gates_at = x + row * 2 * width + col;
    const Quad<Elem> gates = quad_at(gates_at);
    const Quad<Elem> ups = quad_at(gates_at + width);
    const float weight = row_weights[row];
    Quad<Elem> result;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float gate = to_float(gates.elems[i]);
      result.elems[i] = from_float<Elem>(gate * sigmoid<Elem>(gate) * to_float(ups.elems[i]) * weight);
    }
    return result;
  }
};

// The gradient of weight * silu(gate) * up, as csrc/layer/swiglu.cu computes it: of the gates in the left half, of the
// ups in the right. The left half has all that the weight's gradient wants.
template <typename Elem>
struct SwigluGradSource {
  using Stored = Elem;
  static constexpr bool kSums = true;
  static constexpr int kBlocksPerSm = sizeof(Elem) == 4 ? 2 : 3;
  const Elem* x;
  const Elem* grads;
  const float* row_weights;
  int64_t width;

  template <int kRows>
  __device__ void load_rows(int64_t row, int64_t col, Quad<Elem> (&values)[kRows], float (&sums)[kRows]) const {
    if (col < width / 2) {  // one branch for all rows, and as a rule one way for all threads of a block
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        values[i] = of_gates(row + i, col, sums[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        values[i] = of_ups(row + i, col - width / 2);
      }
    }
  }

 private:
  __device__ Quad<Elem> of_gates(int64_t row, int64_t col, float& sum) const {
    const Quad<Elem> gates = quad_at(x + row * width + col);
    const Quad<Elem> ups = quad_at(x + row * width + width / 2 + col);
    const Quad<Elem> gradients = quad_at(grads + row * (width / 2) + col);
    const float weight = row_weights[row];
    Quad<Elem> result;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float gate = to_float(gates.elems[i]);
      const float up = to_float(ups.elems[i]);
      const float grad = to_float(gradients.elems[i]);
      const float s = sigmoid<Elem>(gate);
      result.elems[i] = from_float<Elem>(grad * weight * up * s * (1.0f + gate * (1.0f - s)));
      sum += grad * (gate * s * up);
    }
    return result;
  }

  __device__ Quad<Elem> of_ups(int64_t row, int64_t col) const {
    const Quad<Elem> gates = quad_at(x + row * width + col);
    const Quad<Elem> gradients = quad_at(grads + row * (width / 2) + col);
    const float weight = row_weights[row];
    Quad<Elem> result;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float gate = to_float(gates.elems[i]);
      result.elems[i] = from_float<Elem>(to_float(gradients.elems[i]) * weight * (gate * sigmoid<Elem>(gate)));
    }
    return result;
  }
};

struct Fp8Source {
  using Stored = __nv_bfloat16;
  static constexpr bool kSums = false;
  static constexpr int kBlocksPerSm = 4;
  const uint8_t* x;
  const float* scales;
  int64_t width;

  __device__ Quad<__nv_bfloat16> load(const RowTile& tile, int64_t row, int64_t col) const {
    const int64_t num_blocks = (width + kTile - 1) / kTile;
    const int64_t at = tile.expert_begin * num_blocks + col / kTile * tile.expert_rows + (row - tile.expert_begin);
    const float scale = scales[at];
    const Quad<uint8_t> codes = quad_at(x + row * width + col);
    Quad<__nv_bfloat16> result;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      __nv_fp8_e4m3 code;
      code.__x = codes.elems[i];
      result.elems[i] = __float2bfloat16_rn(__fmul_rn(static_cast<float>(code), scale));
    }
    return result;
  }
};

}  // namespace
}  // namespace moe_ep
