// A rail whose ranks reach each other's memory through CUDA IPC: nodes that are no nodes, on one machine. It serves to
// test what goes on between nodes where there is no network and no NVSHMEM.
#pragma once

#include <string>

#include "internode/rail.h"

namespace moe_ep {

struct IpcHop {
  char* block;
  char* peers[kMaxNodes];

  __device__ void put_signal(int node, int64_t to, const char* from, int64_t num_bytes, int64_t signal,
                             uint64_t value) const;
  __device__ char* reach(int node) const;
  __device__ void signal(int node, int64_t signal, uint64_t value) const;
  __device__ uint64_t seen(const uint64_t* word) const;
};

class IpcRail : public RailTransport {
 public:
  // Takes memory on the current device: the block, zeroed. `node_state` and `record` are those of the node's exchange.
  IpcRail(int node, int num_nodes, int64_t flow_bytes, uintptr_t node_state, uintptr_t record, double timeout_secs);
  ~IpcRail() override;
  IpcRail(const IpcRail&) = delete;
  IpcRail& operator=(const IpcRail&) = delete;

  // Handles for the other processes of this machine.
  std::string export_block() const;
  void open_block(int node, const std::string& exported);

  void open(const Call& call, cudaStream_t stream) override;
  void send(const RailRound& round, const RailRows& rows, int num_sms, cudaStream_t stream) override;
  void wait_free(const RailRound& round, cudaStream_t stream) override;
  void wait(const RailRound& round, cudaStream_t stream) override;
  void take(const RailRound& round, cudaStream_t stream) override;
  void settle(cudaStream_t) override {}  // stores are there when their kernel has ended

 private:
  IpcHop hop_;
};

}  // namespace moe_ep
