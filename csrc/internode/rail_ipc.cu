#include <cstring>

#include "exchange/host.h"
#include "internode/rail_ipc.h"
#include "internode/rail_kernels.cuh"

namespace moe_ep {

__device__ inline void IpcHop::put_signal(int node, int64_t to, const char* from, int64_t num_bytes, int64_t signal,
                                          uint64_t value) const {
  copy_pieces(peers[node] + to, from, num_bytes, threadIdx.x, kRailThreads);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    this->signal(node, signal, value);
  }
}

__device__ inline char* IpcHop::reach(int node) const { return peers[node]; }

__device__ inline void IpcHop::signal(int node, int64_t signal, uint64_t value) const {
  store_release(reinterpret_cast<uint64_t*>(peers[node] + signal), value);
}

__device__ inline uint64_t IpcHop::seen(const uint64_t* word) const { return load_acquire(word); }

IpcRail::IpcRail(int node, int num_nodes, int64_t flow_bytes, uintptr_t node_state, uintptr_t record,
                 double timeout_secs)
    : RailTransport(node, num_nodes, flow_bytes) {
  watch(node_state, record, timeout_secs);
  const int64_t num_bytes = whole_pages(rail_block_bytes(rail_));
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&rail_.block), num_bytes), "internode: memory for the rail");
  check_cuda(cudaMemset(rail_.block, 0, sizeof(RailSignals)), "internode: zeroing the signals");
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&rail_.state), sizeof(RailState)), "internode: memory for the state");
  std::memset(&hop_, 0, sizeof(hop_));
  hop_.block = hop_.peers[node] = rail_.block;
  load_rail_kernels<IpcHop>();
  begin_generation(0);
}

IpcRail::~IpcRail() {
  quietly_on(device_, [&] {
    for (int node = 0; node < rail_.num_nodes; ++node) {
      if (node != rail_.node && hop_.peers[node] != nullptr) {
        cudaIpcCloseMemHandle(hop_.peers[node]);
      }
    }
    cudaFree(rail_.block);
    cudaFree(rail_.state);
  });
}

std::string IpcRail::export_block() const {
  const OnDevice on_device(device_);
  return export_memory(rail_.block);
}

void IpcRail::open_block(int node, const std::string& exported) {
  MOE_EP_CHECK(0 <= node && node < rail_.num_nodes && node != rail_.node, "node is ", node,
               ": name another one of the rail.");
  const OnDevice on_device(device_);
  hop_.peers[node] = static_cast<char*>(open_memory(exported));
}

void IpcRail::open(const Call& call, cudaStream_t stream) { launch_rail_open(rail_, hop_, call, stream); }

void IpcRail::send(const RailRound& round, const RailRows& rows, int num_sms, cudaStream_t stream) {
  launch_rail_send(rail_, hop_, round, rows, num_sms, stream);
}

void IpcRail::wait_free(const RailRound& round, cudaStream_t stream) {
  launch_rail_wait_free(rail_, hop_, round, stream);
}

void IpcRail::wait(const RailRound& round, cudaStream_t stream) { launch_rail_wait(rail_, hop_, round, stream); }

void IpcRail::take(const RailRound& round, cudaStream_t stream) { launch_rail_take(rail_, hop_, round, stream); }

}  // namespace moe_ep
