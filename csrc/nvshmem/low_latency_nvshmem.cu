#include <nvshmem.h>
#include <nvshmemx.h>

#include "low_latency/combine.cuh"
#include "low_latency/dispatch.cuh"
#include "nvshmem/low_latency_nvshmem.h"

namespace moe_ep {

// See low_latency/device.cuh. Processing elements are numbered as the ranks of the group.
struct PutHop {
  static constexpr bool kPuts = true;

  static __device__ void put(char* to, const char* from, int64_t num_bytes, uint64_t* word, uint64_t value, int peer) {
    nvshmemx_putmem_signal_nbi_warp(to, from, num_bytes, word, value, NVSHMEM_SIGNAL_SET, peer);
  }
  static __device__ void signal(uint64_t* word, uint64_t value, int peer) {
    nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, peer);
  }
  static __device__ void fence() { nvshmem_fence(); }
  static __device__ void settle() { nvshmem_quiet(); }

  // Ranks that store write words too, so the look has to be one that acquires what came before them.
  static __device__ uint64_t seen(const uint64_t* word) { return load_acquire(word); }
  // The wait ends at once, also where the word has changed since, for no word has that value. It promises that the rows
  // before the word can be read, as NVSHMEM puts them.
  static __device__ void arrived(const uint64_t* word) {
    nvshmem_signal_wait_until(const_cast<uint64_t*>(word), NVSHMEM_CMP_NE, ~uint64_t{0});
    __threadfence_system();
  }
};

template void launch_low_latency_dispatch<PutHop>(const LowLatencyCall&, const LowLatencyDispatch&, int, cudaStream_t);
template void launch_low_latency_combine<PutHop>(const LowLatencyCall&, const LowLatencyCombine&, RowKind, int,
                                                 cudaStream_t);
template void launch_low_latency_refusal<PutHop>(const LowLatencyCall&, cudaStream_t);
template void launch_low_latency_drain<PutHop>(const LowLatencyCall&, cudaStream_t);

namespace {

World world_of(int rank, int size) {
  MOE_EP_CHECK(1 <= size && size <= kMaxLowLatencyRanks, "the EP group has ", size,
               " ranks; the low-latency kernels take 1 to ", kMaxLowLatencyRanks, ": use hop=\"torch\".");
  World world = {};
  world.rank = rank;
  world.size = size;
  return world;
}

int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "low latency: the current device");
  return device;
}

}  // namespace

NvshmemLowLatency::NvshmemLowLatency(int rank, int size, uintptr_t state, uintptr_t record, double timeout_secs)
    : LowLatencyMemory(world_of(rank, size), current_device()) {
  MOE_EP_CHECK(nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED,
               "NVSHMEM is not initialised in this process: initialise it with nvshmem4py first.");
  MOE_EP_CHECK(nvshmem_my_pe() == rank && nvshmem_n_pes() == size, "NVSHMEM numbers this rank ", nvshmem_my_pe(),
               " of ", nvshmem_n_pes(), ", the EP group ", rank, " of ", size,
               ": begin it over the ranks of the group.");
  watch(state, record, timeout_secs);
  load_low_latency_dispatch<PutHop>();
  load_low_latency_combine<PutHop>();
}

void NvshmemLowLatency::watch(uintptr_t state, uintptr_t record, double timeout_secs) {
  call_.world.state = reinterpret_cast<State*>(state);
  call_.world.record = reinterpret_cast<HostRecord*>(record);
  call_.world.timeout_ns = static_cast<uint64_t>(timeout_secs * 1e9);
}

void NvshmemLowLatency::allocate(int64_t words_a_slot, int64_t bytes_a_slot) {
  const OnDevice on_device(device());
  release();
  const int64_t num_bytes = lay_out(words_a_slot, bytes_a_slot, 4);
  own() = static_cast<char*>(nvshmem_malloc(num_bytes));
  if (own() == nullptr) {
    lay_out(0, 0, 4);
    fail("NVSHMEM has no ", num_bytes,
         " bytes of symmetric memory left for low-latency rows: raise NVSHMEM_SYMMETRIC_SIZE, or lower M.");
  }
  clear();
}

void NvshmemLowLatency::open(const std::vector<bool>& stored_to) {
  MOE_EP_CHECK(stored_to.size() == static_cast<size_t>(size()), "stored_to names ", stored_to.size(),
               " ranks, there are ", size(), ".");
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != call_.world.rank) {
      call_.memory[peer] = stored_to[peer] ? static_cast<char*>(nvshmem_ptr(own(), peer)) : nullptr;
    }
  }
}

void NvshmemLowLatency::release() {
  const OnDevice on_device(device());
  if (own() != nullptr) {
    nvshmem_free(own());
  }
  for (char*& memory : call_.memory) {
    memory = nullptr;
  }
  lay_out(0, 0, 4);
}

std::vector<int> NvshmemLowLatency::put_to() const {
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    if (call_.memory[peer] == nullptr) {
      peers.push_back(peer);
    }
  }
  return peers;
}

}  // namespace moe_ep
