// A row of float32 held by one warp, for the .cu files: lane l holds the elements l, l + 32, l + 64, ...
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "common/warp.cuh"

namespace moe_ep {

constexpr int kWarp = 32;

template <typename Value>
__device__ Value warp_max(Value value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Value other = __shfl_xor_sync(kFullWarp, value, offset);
    value = value > other ? value : other;
  }
  return value;
}

// Every lane gets the same bits, because at each step both partners add the same two numbers.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

template <int kPerLane>
__device__ void load_row(const float* row, int num_elems, int lane, float outside, float (&values)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int elem = i * kWarp + lane;
    values[i] = elem < num_elems ? row[elem] : outside;
  }
}

template <int kPerLane>
__device__ void store_row(float* row, int num_elems, int lane, const float (&values)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int elem = i * kWarp + lane;
    if (elem < num_elems) {
      row[elem] = values[i];
    }
  }
}

template <int kPerLane>
__device__ void copy_row(const float (&from)[kPerLane], float (&to)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    to[i] = from[i];
  }
}

template <int kPerLane>
__device__ float row_sum(const float (&values)[kPerLane]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    sum += values[i];
  }
  return warp_sum(sum);
}

template <int kPerLane>
__device__ float row_max(const float (&values)[kPerLane]) {
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) {
    largest = largest > values[i] ? largest : values[i];
  }
  return warp_max(largest);
}

// The largest and the sum of exponentials of a row: softmax(x) = exp(x - largest) / total.
struct SoftmaxStats {
  float largest;
  float total;

  __device__ float prob(float logit) const { return expf(logit - largest) / total; }
};

// Elements outside the row must be -inf.
template <int kPerLane>
__device__ SoftmaxStats softmax_stats(const float (&logits)[kPerLane]) {
  SoftmaxStats stats;
  stats.largest = row_max(logits);
  float exponentials[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    exponentials[i] = expf(logits[i] - stats.largest);
  }
  stats.total = row_sum(exponentials);
  return stats;
}

}  // namespace moe_ep
