// A rail over NVSHMEM: put-with-signal of its public device API, so that every transport of its serves.
#pragma once

#include <vector>

#include "internode/rail.h"

namespace moe_ep {

struct NvshmemHop {
  char* block;  // symmetric: the same object on all processing elements
  int pes[kMaxNodes];

  __device__ void put_signal(int node, int64_t to, const char* from, int64_t num_bytes, int64_t signal,
                             uint64_t value) const;
  __device__ char* reach(int node) const;
  __device__ void signal(int node, int64_t signal, uint64_t value) const;
  __device__ uint64_t seen(uint64_t* word) const;
};

// NVSHMEM is initialised in this process (nvshmem4py does it, by a unique id), and stays so while this lives.
class NvshmemRail : public RailTransport {
 public:
  // `pes`: the processing elements of the rail, by node. Takes symmetric memory: all processing elements construct it
  // together, with the same `flow_bytes` and number of nodes. The rest as IpcRail.
  NvshmemRail(int node, const std::vector<int>& pes, int64_t flow_bytes, uintptr_t node_state, uintptr_t record,
              double timeout_secs);
  ~NvshmemRail() override;
  NvshmemRail(const NvshmemRail&) = delete;
  NvshmemRail& operator=(const NvshmemRail&) = delete;

  // Frees the symmetric memory. All processing elements call it together, before NVSHMEM is finalised.
  void release();

  // Where this GPU finds the block of processing element `pe`, or 0 where it does not reach it.
  uintptr_t address_at(int pe) const;

  void open(const Call& call, cudaStream_t stream) override;
  void send(const RailRound& round, const RailRows& rows, int num_sms, cudaStream_t stream) override;
  void wait_free(const RailRound& round, cudaStream_t stream) override;
  void wait(const RailRound& round, cudaStream_t stream) override;
  void take(const RailRound& round, cudaStream_t stream) override;
  void settle(cudaStream_t stream) override;

 private:
  NvshmemHop hop_;
};

// Makes this extension's kernels known to the NVSHMEM of the process; once, after its initialisation.
void register_kernels();

}  // namespace moe_ep
