#include "internode/rail.h"

#include <cstring>

#include "common/check.h"
#include "exchange/host.h"

namespace moe_ep {

RailTransport::RailTransport(int node, int num_nodes, int64_t flow_bytes) {
  MOE_EP_CHECK(1 <= num_nodes && num_nodes <= kMaxNodes, "the EP group has ", num_nodes,
               " nodes; the internode backend takes 1 to ", kMaxNodes, ": use fewer nodes, or backend=\"torch\".");
  MOE_EP_CHECK(0 <= node && node < num_nodes, "node is ", node, ", but there are ", num_nodes, ".");
  MOE_EP_CHECK(flow_bytes > 0 && flow_bytes % 256 == 0, "flow_bytes is ", flow_bytes,
               "; it must be a multiple of 256.");
  std::memset(&rail_, 0, sizeof(rail_));
  rail_.node = node;
  rail_.num_nodes = num_nodes;
  rail_.flow_bytes = flow_bytes;
  check_cuda(cudaGetDevice(&device_), "internode: the current device");
}

void RailTransport::watch(uintptr_t node_state, uintptr_t record, double timeout_secs) {
  rail_.node_state = reinterpret_cast<State*>(node_state);
  rail_.record = reinterpret_cast<HostRecord*>(record);
  rail_.timeout_ns = static_cast<uint64_t>(timeout_secs * 1e9);
}

void RailTransport::begin_generation(uint32_t generation) {
  const OnDevice on_device(device_);
  const RailState state = {generation, 0, 0, 0};
  check_cuda(cudaMemcpy(rail_.state, &state, sizeof(state), cudaMemcpyHostToDevice), "internode: a new generation");
  check_cuda(cudaStreamSynchronize(nullptr), "internode: a new generation");
}

uint64_t RailTransport::sent_bytes() const {
  const OnDevice on_device(device_);
  RailState state;
  check_cuda(cudaDeviceSynchronize(), "internode: waiting for the rail");
  check_cuda(cudaMemcpy(&state, rail_.state, sizeof(state), cudaMemcpyDeviceToHost), "internode: reading the state");
  return state.sent_bytes;
}

}  // namespace moe_ep
