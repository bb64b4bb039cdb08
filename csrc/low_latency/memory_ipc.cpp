#include "common/check.h"
#include "low_latency/memory.h"

namespace moe_ep {

IpcLowLatency::IpcLowLatency(const Exchange& exchange) : LowLatencyMemory(exchange.world(), exchange.device()) {
  const OnDevice on_device(device());
  load_low_latency_dispatch<StoreHop>();
  load_low_latency_combine<StoreHop>();
}

IpcLowLatency::~IpcLowLatency() {
  quietly_on(device(), [&] {
    close();
    cudaFree(own());
  });
}

void IpcLowLatency::allocate(int64_t words_a_slot, int64_t bytes_a_slot) {
  const OnDevice on_device(device());
  check_cuda(cudaFree(own()), "low latency: freeing memory");
  own() = nullptr;
  lay_out(0, 0, 2);
  char* memory = nullptr;
  const int64_t num_bytes = lay_out(words_a_slot, bytes_a_slot, 2);
  const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&memory), whole_pages(num_bytes));
  if (error != cudaSuccess) {
    lay_out(0, 0, 2);
  }
  check_cuda(error, "low latency: memory for rows of the other ranks");
  own() = memory;
  clear();
}

std::string IpcLowLatency::export_own() const {
  const OnDevice on_device(device());
  return export_memory(call_.memory[call_.world.rank]);
}

void IpcLowLatency::open(int peer, const std::string& exported) {
  const OnDevice on_device(device());
  call_.memory[peer] = static_cast<char*>(open_memory(exported));
}

void IpcLowLatency::close() {
  const OnDevice on_device(device());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != call_.world.rank && call_.memory[peer] != nullptr) {
      cudaIpcCloseMemHandle(call_.memory[peer]);
      call_.memory[peer] = nullptr;
    }
  }
}

}  // namespace moe_ep
