// The error rule of csrc: a failed check throws one sentence (what was given, what the limit is, what to do), which
// Python sees as RuntimeError. Nothing here prints, exits or traps: the caller's process and context live on.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>

namespace moe_ep {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw std::runtime_error(sentence.str());
}

// Throws where a CUDA call failed. `what` names the step, for example "fp8_cast_1x128: the launch".
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) {
    return;
  }
  // The one failure that a user can mend: the build left out this GPU.
  const char* hint = error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion
                         ? " Build again with MOE_EP_CUDA_ARCHS naming this GPU's architecture, or update the driver."
                         : "";
  fail(what, " failed with ", cudaGetErrorName(error), ": ", cudaGetErrorString(error), ".", hint);
}

}  // namespace moe_ep

// MOE_EP_CHECK(num_sms >= 1, "num_sms is ", num_sms, ", the least is 1: ...");
#define MOE_EP_CHECK(cond, ...)    \
  do {                             \
    if (!(cond)) {                 \
      ::moe_ep::fail(__VA_ARGS__); \
    }                              \
  } while (0)
