// What a launch asks of the device before it chooses its grid and its shared memory.
#pragma once

#include <cuda_runtime.h>

#include "check.h"

namespace moe_ep {

// The number of SMs of the current device.
inline int device_sms() {
  int device = 0;
  int num_sms = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "asking for the number of SMs");
  return num_sms;
}

// A block gets more than 48 KiB of dynamic shared memory only where the kernel has been allowed to.
template <typename Kernel>
void allow_shared_bytes(Kernel kernel, size_t num_bytes, const char* what) {
  constexpr size_t kFree = 48 * 1024;
  if (num_bytes > kFree) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(num_bytes)),
               what);
  }
}

}  // namespace moe_ep
