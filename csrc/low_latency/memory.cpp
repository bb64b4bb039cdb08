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

LowLatencyMemory::LowLatencyMemory(const World& world, int device) : device_(device) {
  const OnDevice on_device(device_);
  std::memset(static_cast<void*>(&call_), 0, sizeof(call_));
  call_.world = world;
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&call_.state), sizeof(LowLatencyState)),
             "low latency: memory for the state");
}

LowLatencyMemory::~LowLatencyMemory() {
  quietly_on(device_, [&] { cudaFree(call_.state); });
}

int64_t LowLatencyMemory::lay_out(int64_t words_a_slot, int64_t bytes_a_slot, int num_row_slots) {
  const auto part_of = [&](int64_t whole, int64_t multiple) {
    const int64_t part = (whole + size() - 1) / size();
    return (part + multiple - 1) / multiple * multiple;
  };
  call_.words_a_source = part_of(words_a_slot, 16);
  call_.bytes_a_source = part_of(bytes_a_slot, 128);
  return bytes_of_words(size(), call_.words_a_source) + num_row_slots * size() * call_.bytes_a_source;
}

void LowLatencyMemory::clear() {
  const OnDevice on_device(device_);
  check_cuda(cudaMemset(own(), 0, bytes_of_words(size(), call_.words_a_source)), "low latency: zeroing the words");
  check_cuda(cudaStreamSynchronize(nullptr), "low latency: zeroing the words");
}

void LowLatencyMemory::begin(uint32_t generation) {
  const OnDevice on_device(device_);
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
  call.world.operation = operation;
  return call;
}

}  // namespace moe_ep
