// What a launch asks of the device before it chooses its grid.
#pragma once

#include <cuda_runtime.h>

#include "common/check.h"

namespace moe_ep {

// The number of SMs of the current device.
inline int device_sms() {
  int device = 0;
  int num_sms = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "asking for the number of SMs");
  return num_sms;
}

}  // namespace moe_ep
