// More shared memory than a kernel gets unasked.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "common/check.h"

namespace moe_ep {

// The most that a block of the current device may have, static and dynamic together.
inline int most_shared_bytes() {
  int device = 0, num_bytes = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetAttribute(&num_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "asking for the shared memory of a block");
  return num_bytes;
}

// Lets `kernel` have `num_bytes` of dynamic shared memory on the current device; asks once a device, since asking costs
// some microseconds of every launch.
template <auto kernel>
void allow_shared_memory(int num_bytes, const char* what) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> allowed[kMaxDevices];
  int device = 0;
  check_cuda(cudaGetDevice(&device), what);
  if (device < kMaxDevices && allowed[device].load(std::memory_order_relaxed) >= num_bytes) {
    return;
  }
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, num_bytes), what);
  if (device < kMaxDevices) {
    allowed[device].store(num_bytes, std::memory_order_relaxed);
  }
}

}  // namespace moe_ep
