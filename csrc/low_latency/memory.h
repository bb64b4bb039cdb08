// The host side of the low-latency calls: memory that the ranks of a node write into each other's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "exchange/host.h"
#include "low_latency/low_latency.h"

namespace moe_ep {

// One rank's part: words and rows in two slots, which can be replaced, the mappings of the other ranks' and the state
// of the calls. Not thread safe. Methods throw std::runtime_error with a sentence where CUDA refuses. `exchange` lives
// longer; what fails, or times out, is in its record.
class LowLatencyMemory {
 public:
  explicit LowLatencyMemory(const Exchange& exchange);
  ~LowLatencyMemory();
  LowLatencyMemory(const LowLatencyMemory&) = delete;
  LowLatencyMemory& operator=(const LowLatencyMemory&) = delete;

  // Replaces the own memory by words that no call has written yet and rows, at least so many, divided among the
  // sources. No peer may have the old one open.
  void allocate(int64_t words_a_slot, int64_t bytes_a_slot);
  std::string export_own() const;
  void open(int peer, const std::string& exported);
  void close();  // the mappings of the others
  int64_t words_a_slot() const { return size() * call_.words_a_source; }
  int64_t bytes_a_slot() const { return size() * call_.bytes_a_source; }
  int size() const { return exchange_.size(); }
  int device() const { return exchange_.device(); }

  // Forgets the words of all calls: a word has 12 bits for the generation, so one of long ago would pass for a new one.
  // Before the ranks meet for a new generation, as what a peer writes behind that is of the new one. No low-latency
  // kernel of this rank may be running.
  void clear();
  // Epoch 0 of a generation. No low-latency kernel of this rank may be running.
  void begin(uint32_t generation);

  // A call that needs so much of a slot; its other members are for the caller to set. Throws where there is less.
  LowLatencyCall call(int64_t operation, int64_t num_words, int64_t num_bytes) const;

 private:
  const Exchange& exchange_;
  LowLatencyCall call_;
};

}  // namespace moe_ep
