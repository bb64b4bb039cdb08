// Calls the host side of csrc while another device is current, on a CUDA runtime that only notes which one is. Prints
// every call of the runtime that is bound to the current device and came while a wrong one was current.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "exchange/host.h"
#include "internode/rail.h"
#include "low_latency/memory.h"

namespace {

constexpr int kOwn = 1, kOther = 0;
int current = kOwn;
std::string step;

cudaError_t bound(const char* call) {
  if (current != kOwn) {
    std::printf("%s: %s\n", step.c_str(), call);
  }
  return cudaSuccess;
}

cudaError_t bound_with_memory(const char* call, void** pointer, size_t num_bytes) {
  *pointer = std::calloc(1, num_bytes);
  return bound(call);
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t num_bytes) { return bound_with_memory("cudaMalloc", pointer, num_bytes); }
cudaError_t cudaHostAlloc(void** pointer, size_t num_bytes, unsigned int) {
  return bound_with_memory("cudaHostAlloc", pointer, num_bytes);
}
cudaError_t cudaHostGetDevicePointer(void** pointer, void* host, unsigned int) {
  *pointer = host;
  return bound("cudaHostGetDevicePointer");
}
cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return bound("cudaFree");
}
cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return bound("cudaFreeHost");
}
cudaError_t cudaMemset(void* pointer, int value, size_t num_bytes) {
  std::memset(pointer, value, num_bytes);
  return bound("cudaMemset");
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind) {
  std::memcpy(to, from, num_bytes);
  return bound("cudaMemcpy");
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  std::memcpy(handle, &pointer, sizeof(pointer));
  return bound("cudaIpcGetMemHandle");
}
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned int) {
  std::memcpy(pointer, &handle, sizeof(*pointer));
  return bound("cudaIpcOpenMemHandle");
}
cudaError_t cudaIpcCloseMemHandle(void*) { return bound("cudaIpcCloseMemHandle"); }
cudaError_t cudaDeviceSynchronize() { return bound("cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stream == nullptr ? bound("cudaStreamSynchronize") : cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned int) { return bound("cudaEventCreateWithFlags"); }
// These go by the stream, or the event, that they are given.
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
// These are asked about the current device.
cudaError_t cudaDeviceGetPCIBusId(char*, int, int) { return cudaSuccess; }
cudaError_t cudaDeviceGetByPCIBusId(int*, const char*) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int*, int, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return ""; }
const char* cudaGetErrorString(cudaError_t) { return ""; }

}  // extern "C"

namespace moe_ep {

template <>
void load_low_latency_dispatch<StoreHop>() {
  bound("loading kernels");
}
template <>
void load_low_latency_combine<StoreHop>() {
  bound("loading kernels");
}

namespace {

class OneRail : public RailTransport {
 public:
  OneRail() : RailTransport(0, 2, 256) { cudaMalloc(reinterpret_cast<void**>(&rail_.state), sizeof(RailState)); }
  void open(const Call&, cudaStream_t) override {}
  void send(const RailRound&, const RailRows&, int, cudaStream_t) override {}
  void wait_free(const RailRound&, cudaStream_t) override {}
  void wait(const RailRound&, cudaStream_t) override {}
  void take(const RailRound&, cudaStream_t) override {}
  void settle(cudaStream_t) override {}
};

template <typename Work>
void on_other(const char* name, const Work& work) {
  step = name;
  current = kOther;
  work();
  if (current != kOther) {
    std::printf("%s: another device is current behind it\n", name);
  }
}

void call_everything() {
  constexpr int64_t kBytes = 1 << 16;
  current = kOwn;
  Exchange* exchange = new Exchange(0, 2, 1.0);
  on_other("Exchange::export_control", [&] { exchange->export_control(); });
  on_other("Exchange::open_control", [&] { exchange->open_control(1, exchange->export_control()); });
  on_other("Exchange::allocate_segment", [&] { exchange->allocate_segment(kBytes); });
  on_other("Exchange::export_segment", [&] { exchange->export_segment(); });
  on_other("Exchange::open_segment", [&] { exchange->open_segment(1, exchange->export_segment()); });
  on_other("Exchange::allocate_block", [&] { exchange->allocate_block(kBytes); });
  on_other("Exchange::open_block", [&] { exchange->open_block(1, exchange->export_block()); });
  on_other("Exchange::begin_generation", [&] { exchange->begin_generation(1); });
  on_other("Exchange::close_segments", [&] { exchange->close_segments(); });
  on_other("IpcLowLatency", [&] {
    IpcLowLatency memory(*exchange);
    memory.allocate(kBytes, kBytes);
    memory.open(1, memory.export_own());
    memory.clear();
    memory.begin(1);
    memory.close();
    memory.open(1, memory.export_own());
  });
  on_other("~Exchange", [&] { delete exchange; });
  current = kOwn;
  OneRail rail;
  on_other("RailTransport::begin_generation", [&] { rail.begin_generation(1); });
  on_other("RailTransport::sent_bytes", [&] { rail.sent_bytes(); });
}

}  // namespace
}  // namespace moe_ep

int main() {
  moe_ep::call_everything();
  return 0;
}
