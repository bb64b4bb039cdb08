#include "exchange/host.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "common/check.h"

namespace moe_ep {
namespace {

constexpr int64_t kPageBytes = 2 << 20;

}  // namespace

int64_t whole_pages(int64_t num_bytes) { return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

std::string export_memory(void* pointer) {
  cudaIpcMemHandle_t handle;
  check_cuda(cudaIpcGetMemHandle(&handle, pointer), "intranode: exporting memory to the other ranks");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

void* open_memory(const std::string& exported) {
  MOE_EP_CHECK(exported.size() == sizeof(cudaIpcMemHandle_t), "a memory handle has ", exported.size(), " bytes, not ",
               sizeof(cudaIpcMemHandle_t), ": give what export returned on the other rank.");
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, exported.data(), sizeof(handle));
  void* pointer = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess),
             "intranode: opening another rank's memory");
  return pointer;
}

Exchange::Exchange(int rank, int size, double timeout_secs) {
  MOE_EP_CHECK(1 <= size && size <= kMaxRanks, "the EP group has ", size, " ranks; the intranode backend takes 1 to ",
               kMaxRanks, ": use backend=\"torch\".");
  std::memset(&world_, 0, sizeof(world_));
  world_.rank = rank;
  world_.size = size;
  world_.timeout_ns = static_cast<uint64_t>(timeout_secs * 1e9);
  check_cuda(cudaGetDevice(&device_), "intranode: the current device");
  const int64_t state_offset = whole_pages(sizeof(Control));
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, state_offset + kPageBytes), "intranode: memory for the control block");
  world_.control[rank] = static_cast<Control*>(memory);
  world_.state = reinterpret_cast<State*>(static_cast<char*>(memory) + state_offset);
  check_cuda(cudaMemset(memory, 0, state_offset + kPageBytes), "intranode: zeroing the control block");
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&record_), sizeof(HostRecord), cudaHostAllocMapped),
             "intranode: mapped host memory");
  std::memset(static_cast<void*>(record_), 0, sizeof(HostRecord));
  check_cuda(cudaHostGetDevicePointer(reinterpret_cast<void**>(&world_.record), record_, 0),
             "intranode: mapped host memory");
  for (cudaEvent_t* event : {&followed_, &led_}) {
    check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "intranode: an event");
  }
  check_cuda(cudaDeviceSynchronize(), "intranode: the start");
}

Exchange::~Exchange() {
  quietly_on(device_, [&] {
    close_segments();
    for (int peer = 0; peer < world_.size; ++peer) {
      if (peer != world_.rank && world_.control[peer] != nullptr) {
        cudaIpcCloseMemHandle(world_.control[peer]);
      }
    }
    for (int block = 0; block < num_blocks_; ++block) {
      for (int peer = 0; peer < world_.size; ++peer) {
        if (is_opened_[block][peer]) {
          cudaIpcCloseMemHandle(world_.blocks[block][peer]);
        }
      }
      if (!is_adopted_[block]) {
        cudaFree(world_.blocks[block][world_.rank]);
      }
    }
    cudaFree(world_.segment[world_.rank]);
    cudaFree(world_.control[world_.rank]);
    cudaFreeHost(record_);
    cudaEventDestroy(followed_);
    cudaEventDestroy(led_);
  });
}

std::string Exchange::export_control() const {
  const OnDevice on_device(device_);
  return export_memory(world_.control[world_.rank]);
}

std::string Exchange::export_segment() const {
  const OnDevice on_device(device_);
  return export_memory(world_.segment[world_.rank]);
}

void Exchange::open_control(int peer, const std::string& exported) {
  const OnDevice on_device(device_);
  world_.control[peer] = static_cast<Control*>(open_memory(exported));
}

void Exchange::open_segment(int peer, const std::string& exported) {
  const OnDevice on_device(device_);
  world_.segment[peer] = static_cast<char*>(open_memory(exported));
}

void Exchange::close_segments() {
  const OnDevice on_device(device_);
  for (int peer = 0; peer < world_.size; ++peer) {
    if (peer != world_.rank && world_.segment[peer] != nullptr) {
      cudaIpcCloseMemHandle(world_.segment[peer]);
      world_.segment[peer] = nullptr;
    }
  }
}

void Exchange::allocate_segment(int64_t slot_bytes) {
  const OnDevice on_device(device_);
  slot_bytes = whole_pages(slot_bytes);
  check_cuda(cudaFree(world_.segment[world_.rank]), "intranode: freeing the segment");
  world_.segment[world_.rank] = nullptr;
  world_.slot_bytes = 0;
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&world_.segment[world_.rank]), 2 * slot_bytes),
             "intranode: memory for the segment");
  world_.slot_bytes = slot_bytes;
}

uintptr_t Exchange::allocate_block(int64_t num_bytes) {
  MOE_EP_CHECK(num_blocks_ < kMaxBlocks, "the buffer holds ", kMaxBlocks,
               " tensors that peers read in place, which is the limit: use those again.");
  const OnDevice on_device(device_);
  char*& block = world_.blocks[num_blocks_][world_.rank];
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&block), whole_pages(num_bytes < 1 ? 1 : num_bytes)),
             "intranode: memory that peers read in place");
  ++num_blocks_;
  return reinterpret_cast<uintptr_t>(block);
}

std::string Exchange::export_block() const {
  const OnDevice on_device(device_);
  return export_memory(world_.blocks[num_blocks_ - 1][world_.rank]);
}

void Exchange::open_block(int peer, const std::string& exported) {
  const OnDevice on_device(device_);
  world_.blocks[num_blocks_ - 1][peer] = static_cast<char*>(open_memory(exported));
  is_opened_[num_blocks_ - 1][peer] = true;
}

void Exchange::adopt_block(const std::vector<uintptr_t>& addresses) {
  MOE_EP_CHECK(num_blocks_ < kMaxBlocks, "the buffer holds ", kMaxBlocks, " blocks, which is the limit.");
  MOE_EP_CHECK(addresses.size() == static_cast<size_t>(world_.size), "a block lies in ", addresses.size(),
               " places, but there are ", world_.size, " ranks.");
  for (int rank = 0; rank < world_.size; ++rank) {
    world_.blocks[num_blocks_][rank] = reinterpret_cast<char*>(addresses[rank]);
  }
  is_adopted_[num_blocks_] = true;
  ++num_blocks_;
}

void Exchange::begin_generation(uint32_t generation) {
  const OnDevice on_device(device_);
  State state;
  std::memset(&state, 0, sizeof(state));
  state.generation = generation;
  state.bad_slot = ~0ull;
  check_cuda(cudaMemcpy(world_.state, &state, sizeof(state), cudaMemcpyHostToDevice), "intranode: a new generation");
  // A copy from pageable memory may still be under way, and the kernels' stream does not wait for the default one.
  check_cuda(cudaStreamSynchronize(nullptr), "intranode: a new generation");
  record_->timeout.valid = record_->refused.valid = record_->overflow.valid = record_->bad_idx.valid = 0;
  record_->low_latency.valid = record_->num_refused = record_->num_refusals_taken = 0;
}

bool Exchange::follow(cudaStream_t caller) const {
  if (caller != stream_) {
    check_cuda(cudaEventRecord(followed_, caller), "intranode: an event on the caller's stream");
    check_cuda(cudaStreamWaitEvent(stream_, followed_, 0), "intranode: the wait for the caller's stream");
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream_, &status), "intranode: the state of the stream");
  return status != cudaStreamCaptureStatusNone;
}

void Exchange::lead(cudaStream_t caller) const {
  if (caller == stream_) {
    return;
  }
  check_cuda(cudaEventRecord(led_, stream_), "intranode: an event on the stream of the exchange");
  check_cuda(cudaStreamWaitEvent(caller, led_, 0), "intranode: the caller's wait for the exchange");
}

Call Exchange::call(const int64_t* header, int num_match, uint64_t question) const {
  Call call;
  call.world = world_;
  call.world.operation = header[kOperationWord];
  std::memcpy(call.header, header, sizeof(call.header));
  if (header[kStatusWord] == kFine && header[kNeedWord] > world_.slot_bytes) {
    call.header[kStatusWord] = kDoesNotFit;
  }
  call.num_match = num_match;
  call.question = question;
  return call;
}

uint64_t Exchange::answered() const { return __atomic_load_n(&record_->answered, __ATOMIC_ACQUIRE); }

bool Exchange::wait_answer(uint64_t question, double limit_secs) const {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  for (int64_t round = 0;; ++round) {
    if (answered() == question) {
      return true;
    }
    if (round % 1024 != 1023) {
      continue;
    }
    const double waited_secs = std::chrono::duration<double>(Clock::now() - began).count();
    if (waited_secs > limit_secs) {
      return false;
    }
    if (waited_secs > 0.005) {
      const cudaError_t error = cudaStreamQuery(stream_);
      if (error != cudaErrorNotReady) {
        check_cuda(error, "intranode: the stream of the exchange");
        MOE_EP_CHECK(answered() == question, "intranode: a kernel ended without an answer.");
        return true;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

bool Exchange::take_fault(HostRecord::Fault* fault, int64_t (&values)[8]) {
  if (__atomic_load_n(&fault->valid, __ATOMIC_ACQUIRE) == 0) {
    return false;
  }
  std::memcpy(values, fault->values, sizeof(values));
  return true;
}

bool Exchange::has_refusals() const {
  return __atomic_load_n(&record_->refused.valid, __ATOMIC_ACQUIRE) != 0 ||
         __atomic_load_n(&record_->num_refused, __ATOMIC_ACQUIRE) > record_->num_refusals_taken;
}

std::pair<std::string, std::vector<int64_t>> Exchange::take_refusals() {
  int64_t values[8];
  const uint64_t num_kept = take_fault(&record_->refused, values) ? 1 : 0;
  // The device counts behind the record: of the kept one it may not have counted yet.
  const uint64_t num_refused = __atomic_load_n(&record_->num_refused, __ATOMIC_ACQUIRE);
  const uint64_t num_before = record_->num_refusals_taken + num_kept, num_known = std::max(num_refused, num_before);
  const int64_t num_more = static_cast<int64_t>(num_known - num_before);
  record_->num_refusals_taken = num_known;
  if (num_kept == 0) {
    return {"refusals", num_more == 0 ? std::vector<int64_t>{} : std::vector<int64_t>{num_more, 0, 0, 0, 0, 0, 0, 0}};
  }
  std::vector<int64_t> taken(values, values + 8);
  taken[2] = num_more;
  for (int rank = 0; rank < world_.size; ++rank) {
    const int64_t* words = record_->refused_headers[rank];
    taken.insert(taken.end(), words, words + kHeaderWords);
  }
  __atomic_store_n(&record_->refused.valid, 0, __ATOMIC_RELEASE);
  return {"refused", taken};
}

OnDevice::OnDevice(int device) {
  check_cuda(cudaGetDevice(&before_), "intranode: the current device");
  if (before_ != device) {
    check_cuda(cudaSetDevice(device), "intranode: the device of the buffer");
    is_changed_ = true;
  }
}

OnDevice::~OnDevice() {
  if (is_changed_) {
    cudaSetDevice(before_);
  }
}

std::string pci_bus_id() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "intranode: the current device");
  char name[32];
  check_cuda(cudaDeviceGetPCIBusId(name, sizeof(name), device), "intranode: the device's bus number");
  return name;
}

bool can_reach(const std::string& peer_pci_bus_id) {
  int device = 0, peer = 0, can = 0;
  check_cuda(cudaGetDevice(&device), "intranode: the current device");
  if (cudaDeviceGetByPCIBusId(&peer, peer_pci_bus_id.c_str()) != cudaSuccess) {
    cudaGetLastError();  // this process does not see that device
    return false;
  }
  if (peer == device) {
    return true;
  }
  return cudaDeviceCanAccessPeer(&can, device, peer) == cudaSuccess && can != 0;
}

}  // namespace moe_ep
