// The host side of an exchange: memory that the ranks of a node open of each other, and what the device reports.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "exchange/exchange.h"

namespace moe_ep {

// One rank's part of an exchange. It owns a control block of fixed size, a segment of two slots that can be replaced,
// the mappings of the other ranks' and mapped host memory for reports. Not thread safe. All methods throw
// std::runtime_error with a sentence where CUDA refuses. What it does, it does on the device that was current when it
// was made, whichever is current later; this also goes for what stands on it.
class Exchange {
 public:
  // Takes memory on the current device. `timeout_secs` is the limit of every wait on the device.
  Exchange(int rank, int size, double timeout_secs);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Handles for the other processes of this machine.
  std::string export_control() const;
  std::string export_segment() const;
  void open_control(int peer, const std::string& exported);
  void open_segment(int peer, const std::string& exported);
  void close_segments();
  // Replaces the own segment by one whose slots hold at least `slot_bytes` each. No peer may have the old one open.
  void allocate_segment(int64_t slot_bytes);
  int64_t slot_bytes() const { return world_.slot_bytes; }

  // Memory that callers write into and peers read: at most kMaxBlocks blocks, for as long as the exchange lives.
  uintptr_t allocate_block(int64_t num_bytes);  // the address of the newest
  std::string export_block() const;             // of the newest
  // Makes memory that somebody else owns a block: by rank, where this GPU finds it; 0 where `open_block` will say so.
  void adopt_block(const std::vector<uintptr_t>& addresses);
  void open_block(int peer, const std::string& exported);

  int size() const { return world_.size; }
  // Device addresses of the state and of the record, for waits outside the node that fail its calls.
  uintptr_t state_address() const { return reinterpret_cast<uintptr_t>(world_.state); }
  uintptr_t record_address() const { return reinterpret_cast<uintptr_t>(world_.record); }
  int device() const { return device_; }
  bool uses_bulk_copies() const { return uses_bulk_copies_; }

  // The stream of all kernels, which the caller owns, and whether they take the path of sm_90 and later.
  void launch_on(cudaStream_t stream, bool uses_bulk_copies) {
    stream_ = stream;
    uses_bulk_copies_ = uses_bulk_copies;
  }
  cudaStream_t stream() const { return stream_; }
  // Orders the own stream behind what `caller` has been given so far; whether a CUDA graph captures that. A caller on
  // the own stream is in order.
  bool follow(cudaStream_t caller) const;
  // Orders `caller` behind what the own stream has been given so far.
  void lead(cudaStream_t caller) const;

  // Epoch 0 of a generation, faults forgotten. No kernel of this exchange may be running.
  void begin_generation(uint32_t generation);

  // A call with this header, kHeaderWords long. Its status becomes kDoesNotFit where it was fine, but the bytes that it
  // needs are more than a slot has.
  Call call(const int64_t* header, int num_match, uint64_t question) const;

  // Until the device has answered `question`: false where `limit_secs` passed first. Throws where the stream has ended
  // without an answer.
  bool wait_answer(uint64_t question, double limit_secs) const;

  const World& world() const { return world_; }

  HostRecord& record() { return *record_; }
  static bool take_fault(HostRecord::Fault* fault, int64_t (&values)[8]);
  bool has_refusals() const;
  // "refused": the first one since the last look (verdict, epoch, how many calls behind it were refused too, five
  // zeros), then the headers of all ranks. "refusals": how many, where none was kept: they came while the host took
  // one.
  std::pair<std::string, std::vector<int64_t>> take_refusals();

 private:
  uint64_t answered() const;

  World world_;
  int device_ = 0;
  int num_blocks_ = 0;
  bool is_opened_[kMaxBlocks][kMaxRanks] = {};
  bool is_adopted_[kMaxBlocks] = {};
  bool uses_bulk_copies_ = false;
  HostRecord* record_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t followed_ = nullptr, led_ = nullptr;
};

// Memory that other processes of this machine can open. What is exported has pages of its own: a handle stands for the
// whole allocation that a pointer lies in.
int64_t whole_pages(int64_t num_bytes);
std::string export_memory(void* pointer);
void* open_memory(const std::string& exported);

// Makes a device current as long as this lives.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

// The current device, as other processes can name it, and whether its kernels can reach another one's memory.
std::string pci_bus_id();
bool can_reach(const std::string& peer_pci_bus_id);

// What a destructor does on a device. Where CUDA is gone there is nothing left to do.
template <typename Work>
void quietly_on(int device, const Work& work) {
  try {
    const OnDevice on_device(device);
    work();
  } catch (const std::runtime_error&) {
  }
}

}  // namespace moe_ep
