// Low latency over NVSHMEM: memory that this GPU reaches is stored into, all other is put to by the public device API.
#pragma once

#include <vector>

#include "low_latency/memory.h"

namespace moe_ep {

struct PutHop;

// NVSHMEM is initialised in this process, over the ranks of the group in their order, and stays so while this lives.
// All ranks construct, allocate and release together.
class NvshmemLowLatency : public LowLatencyMemory {
 public:
  using Hop = PutHop;

  // `state`, `record`: addresses of an exchange's, which fails where a wait here does, and says so.
  NvshmemLowLatency(int rank, int size, uintptr_t state, uintptr_t record, double timeout_secs);
  ~NvshmemLowLatency() override = default;

  // Another exchange and limit, where the memory serves another buffer.
  void watch(uintptr_t state, uintptr_t record, double timeout_secs);
  // Replaces the memory by words that no call has written yet and rows, at least so many, alike on all ranks. Nothing
  // that any rank has put is on its way.
  void allocate(int64_t words_a_slot, int64_t bytes_a_slot);
  // Finds the memory of the others; those that are not in `stored_to`, by rank, are put to also where this GPU reaches
  // them.
  void open(const std::vector<bool>& stored_to);
  // Frees the memory, before NVSHMEM is finalised.
  void release();
  // Ranks that this one puts to.
  std::vector<int> put_to() const;
};

}  // namespace moe_ep
