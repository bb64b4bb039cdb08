// What a warp is made of.
#pragma once

namespace moe_ep {

constexpr unsigned int kFullWarp = 0xFFFFFFFFu;

__device__ inline int lane_idx() { return threadIdx.x % 32; }
__device__ inline int warp_idx() { return threadIdx.x / 32; }

// By a whole warp: the sum of the values of the lanes before, and of all.
__device__ inline int exclusive_scan(int value, int* total) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, sum, step);
    sum += lane_idx() >= step ? before : 0;
  }
  *total = __shfl_sync(kFullWarp, sum, 31);
  return sum - value;
}

}  // namespace moe_ep
