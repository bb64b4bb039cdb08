#include <cuda.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <algorithm>
#include <cstring>

#include "exchange/host.h"
#include "internode/rail_kernels.cuh"
#include "nvshmem/rail_nvshmem.h"

namespace moe_ep {

__device__ inline void NvshmemHop::put_signal(int node, int64_t to, const char* from, int64_t num_bytes, int64_t signal,
                                              uint64_t value) const {
  nvshmemx_putmem_signal_nbi_block(block + to, from, num_bytes, reinterpret_cast<uint64_t*>(block + signal), value,
                                   NVSHMEM_SIGNAL_SET, pes[node]);
}

__device__ inline char* NvshmemHop::reach(int node) const { return static_cast<char*>(nvshmem_ptr(block, pes[node])); }

// Behind the signals before: a word that an older one overtakes would stay at it. Costs nothing where the transport
// keeps the order by itself.
__device__ inline void NvshmemHop::signal(int node, int64_t signal, uint64_t value) const {
  nvshmem_fence();
  nvshmemx_signal_op(reinterpret_cast<uint64_t*>(block + signal), value, NVSHMEM_SIGNAL_SET, pes[node]);
}

// The wait ends at once, also where the word has changed since, for no signal has that value: a limit is kept by the
// caller. With the fence it promises that the rows before the signal can be read.
__device__ inline uint64_t NvshmemHop::seen(uint64_t* word) const {
  const uint64_t value = nvshmem_signal_fetch(word);
  nvshmem_signal_wait_until(word, NVSHMEM_CMP_NE, ~uint64_t{0});
  __threadfence_system();
  return value;
}

// For all that this GPU has put so far, whichever thread did; what the host issues has a quiet of its own.
__global__ void moe_ep_rail_settle() { nvshmem_quiet(); }

NvshmemRail::NvshmemRail(int node, const std::vector<int>& pes, int64_t flow_bytes, uintptr_t node_state,
                         uintptr_t record, double timeout_secs)
    : RailTransport(node, static_cast<int>(pes.size()), flow_bytes) {
  watch(node_state, record, timeout_secs);
  MOE_EP_CHECK(nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED,
               "NVSHMEM is not initialised in this process: initialise it with nvshmem4py first.");
  const int64_t num_bytes = rail_block_bytes(rail_);
  rail_.block = static_cast<char*>(nvshmem_malloc(num_bytes));
  MOE_EP_CHECK(rail_.block != nullptr, "NVSHMEM has no ", num_bytes,
               " bytes of symmetric memory left: raise NVSHMEM_SYMMETRIC_SIZE.");
  check_cuda(cudaMemset(rail_.block, 0, sizeof(RailSignals)), "internode: zeroing the signals");
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&rail_.state), sizeof(RailState)), "internode: memory for the state");
  std::memset(&hop_, 0, sizeof(hop_));
  hop_.block = rail_.block;
  std::copy(pes.begin(), pes.end(), hop_.pes);
  load_rail_kernels<NvshmemHop>();
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, moe_ep_rail_settle), "internode: loading the kernels");
  begin_generation(0);
}

NvshmemRail::~NvshmemRail() {
  quietly_on(device_, [&] { cudaFree(rail_.state); });
}

void NvshmemRail::release() {
  const OnDevice on_device(device_);
  nvshmem_free(rail_.block);
  rail_.block = hop_.block = nullptr;
}

uintptr_t NvshmemRail::address_at(int pe) const { return reinterpret_cast<uintptr_t>(nvshmem_ptr(rail_.block, pe)); }

void NvshmemRail::open(const Call& call, cudaStream_t stream) { launch_rail_open(rail_, hop_, call, stream); }

void NvshmemRail::send(const RailRound& round, const RailRows& rows, int num_sms, cudaStream_t stream) {
  launch_rail_send(rail_, hop_, round, rows, num_sms, stream);
}

void NvshmemRail::wait_free(const RailRound& round, cudaStream_t stream) {
  launch_rail_wait_free(rail_, hop_, round, stream);
}

void NvshmemRail::wait(const RailRound& round, cudaStream_t stream) { launch_rail_wait(rail_, hop_, round, stream); }

void NvshmemRail::take(const RailRound& round, cudaStream_t stream) { launch_rail_take(rail_, hop_, round, stream); }

void NvshmemRail::settle(cudaStream_t stream) {
  moe_ep_rail_settle<<<1, 1, 0, stream>>>();
  check_cuda(cudaGetLastError(), "internode: the launch of a wait for puts");
}

void register_kernels() {
  cudaFunction_t function = nullptr;
  const void* kernel = reinterpret_cast<const void*>(&moe_ep_rail_take<NvshmemHop>);
  check_cuda(cudaGetFuncBySymbol(&function, kernel), "internode: finding the kernels");
  // The driver's calls by name, so that the extension loads where there is no driver.
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion("cuFuncGetModule", &entry, 11000, cudaEnableDefault, &found),
             "internode: finding cuFuncGetModule");
  MOE_EP_CHECK(found == cudaDriverEntryPointSuccess, "the driver has no cuFuncGetModule: update it.");
  CUmodule module = nullptr;
  const CUresult result =
      reinterpret_cast<CUresult (*)(CUmodule*, CUfunction)>(entry)(&module, reinterpret_cast<CUfunction>(function));
  MOE_EP_CHECK(result == CUDA_SUCCESS, "cuFuncGetModule failed with ", static_cast<int>(result), ".");
  const int status = nvshmemx_cumodule_init(module);
  MOE_EP_CHECK(status == 0, "NVSHMEM did not take the kernels (nvshmemx_cumodule_init returned ", status,
               "): its version must be the one that moe_ep was built with.");
}

}  // namespace moe_ep
