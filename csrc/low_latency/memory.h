// The host side of the low-latency calls: memory that the ranks write into each other's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "exchange/host.h"
#include "low_latency/low_latency.h"

namespace moe_ep {

// One rank's part, whatever the hop: words and rows in two slots, and the state of the calls. Not thread safe. Methods
// throw std::runtime_error with a sentence where CUDA refuses.
class LowLatencyMemory {
 public:
  virtual ~LowLatencyMemory();
  LowLatencyMemory(const LowLatencyMemory&) = delete;
  LowLatencyMemory& operator=(const LowLatencyMemory&) = delete;

  int64_t words_a_slot() const { return size() * call_.words_a_source; }
  int64_t bytes_a_slot() const { return size() * call_.bytes_a_source; }
  int size() const { return call_.world.size; }
  int device() const { return device_; }

  // Forgets the words of all calls: a word has 12 bits for the generation, so one of long ago would pass for a new one.
  // Before the ranks meet for a new generation, as what a peer writes behind that is of the new one. No low-latency
  // kernel of this rank may be running.
  void clear();
  // Epoch 0 of a generation. No low-latency kernel of this rank may be running.
  void begin(uint32_t generation);

  // A call that needs so much of a slot; its other members are for the caller to set. Throws where there is less.
  LowLatencyCall call(int64_t operation, int64_t num_words, int64_t num_bytes) const;

 protected:
  // `world`: of an exchange, whose record says what fails; only rank, size, limit, state and record are looked at.
  LowLatencyMemory(const World& world, int device);

  char*& own() { return call_.memory[call_.world.rank]; }
  // What `words_a_slot` words and `bytes_a_slot` bytes, divided among the sources, need with so many slots of rows;
  // they are the sizes from now on.
  int64_t lay_out(int64_t words_a_slot, int64_t bytes_a_slot, int num_row_slots);

  LowLatencyCall call_;

 private:
  int device_;
};

// Memory that the other ranks open over CUDA IPC. `exchange` lives longer.
class IpcLowLatency : public LowLatencyMemory {
 public:
  using Hop = StoreHop;

  explicit IpcLowLatency(const Exchange& exchange);
  ~IpcLowLatency() override;

  // Replaces the own memory by words that no call has written yet and rows, at least so many. No peer may have the old
  // one open.
  void allocate(int64_t words_a_slot, int64_t bytes_a_slot);
  std::string export_own() const;
  void open(int peer, const std::string& exported);
  void close();  // the mappings of the others
};

}  // namespace moe_ep
