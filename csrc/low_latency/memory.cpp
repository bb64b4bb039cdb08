#include "low_latency/memory.h"

#include <cstring>

#include "common/check.h"

namespace moe_ep {
namespace {

// Of both slots, behind the control block.
int64_t bytes_of_words(int size, int64_t words_a_source) {
  return kLowLatencyControlBytes + 2 * size * words_a_source * static_cast<int64_t>(sizeof(uint64_t));
}

}  // namespace

LowLatencyMemory::LowLatencyMemory(const Exchange& exchange) : exchange_(exchange) {
  const OnDevice on_device(device());
  std::memset(static_cast<void*>(&call_), 0, sizeof(call_));
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&call_.state), sizeof(LowLatencyState)),
             "low latency: memory for the state");
  load_low_latency_dispatch();
  load_low_latency_combine();
}

LowLatencyMemory::~LowLatencyMemory() {
  quietly_on(device(), [&] {
    close();
    cudaFree(call_.memory[exchange_.world().rank]);
    cudaFree(call_.state);
  });
}

void LowLatencyMemory::allocate(int64_t words_a_slot, int64_t bytes_a_slot) {
  const OnDevice on_device(device());
  char*& own = call_.memory[exchange_.world().rank];
  check_cuda(cudaFree(own), "low latency: freeing memory");
  own = nullptr;
  call_.words_a_source = call_.bytes_a_source = 0;
  const auto part_of = [&](int64_t whole, int64_t multiple) {
    const int64_t part = (whole + size() - 1) / size();
    return (part + multiple - 1) / multiple * multiple;
  };
  const int64_t words_a_source = part_of(words_a_slot, 16), bytes_a_source = part_of(bytes_a_slot, 128);
  const int64_t num_bytes = bytes_of_words(size(), words_a_source) + 2 * size() * bytes_a_source;
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&own), whole_pages(num_bytes)),
             "low latency: memory for rows of the other ranks");
  call_.words_a_source = words_a_source;
  call_.bytes_a_source = bytes_a_source;
  clear();
}

void LowLatencyMemory::clear() {
  const OnDevice on_device(device());
  check_cuda(cudaMemset(call_.memory[exchange_.world().rank], 0, bytes_of_words(size(), call_.words_a_source)),
             "low latency: zeroing the words");
  check_cuda(cudaStreamSynchronize(nullptr), "low latency: zeroing the words");
}

std::string LowLatencyMemory::export_own() const {
  const OnDevice on_device(device());
  return export_memory(call_.memory[exchange_.world().rank]);
}

void LowLatencyMemory::open(int peer, const std::string& exported) {
  const OnDevice on_device(device());
  call_.memory[peer] = static_cast<char*>(open_memory(exported));
}

void LowLatencyMemory::close() {
  const OnDevice on_device(device());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != exchange_.world().rank && call_.memory[peer] != nullptr) {
      cudaIpcCloseMemHandle(call_.memory[peer]);
      call_.memory[peer] = nullptr;
    }
  }
}

void LowLatencyMemory::begin(uint32_t generation) {
  const OnDevice on_device(device());
  LowLatencyState state;
  std::memset(static_cast<void*>(&state), 0, sizeof(state));
  state.generation = generation;
  check_cuda(cudaMemcpy(call_.state, &state, sizeof(state), cudaMemcpyHostToDevice), "low latency: a new generation");
  check_cuda(cudaStreamSynchronize(nullptr), "low latency: a new generation");
}

LowLatencyCall LowLatencyMemory::call(int64_t operation, int64_t num_words, int64_t num_bytes) const {
  MOE_EP_CHECK(num_words <= words_a_slot() && num_bytes <= bytes_a_slot(), "the low-latency call needs ", num_words,
               " words and ", num_bytes, " bytes a slot, there are ", words_a_slot(), " and ", bytes_a_slot(),
               ": make room first.");
  LowLatencyCall call = call_;
  call.world = exchange_.world();
  call.world.operation = operation;
  return call;
}

}  // namespace moe_ep
