// Device side of the flag protocol (docs/protocol.md): flags, waits with a limit, headers and their verdict, tickets,
// and the end of a call. Ranks meet by acquire and release at system scope alone; nothing is zeroed, flags carry
// (generation, epoch).
#pragma once

#include "common/warp.cuh"
#include "exchange/exchange.h"

namespace moe_ep {

__device__ inline uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// A word that stands for nothing but its own value, and a look at one.
__device__ inline void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint32_t load_acquire_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint32_t load_relaxed_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// One call as a block sees it.
struct Turn {
  uint32_t generation;
  uint32_t epoch;
  uint64_t tag;
  int slot;
};

__device__ inline uint64_t tag_of(uint32_t generation, uint32_t epoch) {
  return static_cast<uint64_t>(generation) << 32 | (epoch + 1);
}

__device__ inline Turn turn_of(const World& world) {
  const uint32_t generation = world.state->generation, epoch = world.state->epoch;
  return {generation, epoch, tag_of(generation, epoch), static_cast<int>(epoch % 2)};
}

__device__ inline char* slot_of(const World& world, int rank, const Turn& turn) {
  return world.segment[rank] + turn.slot * world.slot_bytes;
}

// -- failing ------------------------------------------------------------------------------------------------------

// Whoever fails first says why; the record is read by the host, at the latest on entry to its next call.
__device__ inline void report_failure(State* state, HostRecord* record, int64_t operation, uint32_t epoch, int peer,
                                      Phase phase, uint64_t expected, uint64_t seen) {
  if (atomicCAS(&state->failed, 0u, 1u) != 0) {
    return;
  }
  HostRecord::Fault& fault = record->timeout;
  const int64_t values[6] = {peer, phase, epoch, static_cast<int64_t>(expected), static_cast<int64_t>(seen), operation};
  for (int i = 0; i < 6; ++i) {
    fault.values[i] = values[i];
  }
  store_release(&fault.valid, 1);
}

__device__ inline void give_up(const World& world, const Turn& turn, int peer, Phase phase, uint64_t expected,
                               uint64_t seen) {
  report_failure(world.state, world.record, world.operation, turn.epoch, peer, phase, expected, seen);
}

// Polls until `ready(value)`; false where the limit passed, the peer gave up, or another wait of this call failed.
template <typename Load, typename Ready>
__device__ bool wait_for(const World& world, const Turn& turn, int peer, Phase phase, uint64_t expected, Load load,
                         Ready ready) {
  uint64_t began = 0;
  for (uint32_t round = 0;; ++round) {
    const uint64_t seen = load();
    if (ready(seen)) {
      return true;
    }
    if (round % 64 != 63) {
      continue;
    }
    const uint64_t now = now_ns();
    began = began == 0 ? now : began;
    if (load_acquire_gpu(&world.state->failed) != 0) {
      return false;
    }
    if (peer >= 0 && load_acquire(&world.control[world.rank]->abort[peer]) == turn.generation) {
      give_up(world, turn, peer, kSawAbort, expected, seen);
      return false;
    }
    if (now - began > world.timeout_ns) {
      give_up(world, turn, peer, phase, expected, seen);
      return false;
    }
    __nanosleep(32);
  }
}

__device__ inline bool wait_word(const World& world, const Turn& turn, int peer, Phase phase, const uint64_t* word,
                                 uint64_t expected) {
  return wait_for(
      world, turn, peer, phase, expected, [=] { return load_acquire(word); },
      [=](uint64_t seen) { return seen == expected; });
}

// Until `peer` is done with call `epoch` of this rank. (16): a generation begins without such waits.
__device__ inline bool wait_done(const World& world, const Turn& turn, int peer, int64_t epoch) {
  if (epoch < 0) {
    return true;
  }
  const uint64_t* word = &world.control[world.rank]->done[peer];
  const uint64_t expected = tag_of(turn.generation, static_cast<uint32_t>(epoch));
  return wait_for(
      world, turn, peer, kWaitDone, expected, [=] { return load_acquire(word); },
      [=](uint64_t seen) { return seen >> 32 == expected >> 32 && seen >= expected; });
}

// Until a counter of this rank's own blocks reaches `expected`; lower tickets bring it there.
__device__ inline bool wait_counter(const World& world, const Turn& turn, const uint32_t* counter, uint32_t expected) {
  return wait_for(
      world, turn, -1, kWaitTicket, expected, [=] { return static_cast<uint64_t>(load_acquire_gpu(counter)); },
      [=](uint64_t seen) { return seen >= expected; });
}

// -- headers ------------------------------------------------------------------------------------------------------

// By a whole warp: waits until every peer is done with the call before the last (1), so that slot e mod 2 is free.
__device__ inline bool slots_are_free(const World& world, const Turn& turn) {
  const int lane = lane_idx();
  const bool free = lane >= world.size || wait_done(world, turn, lane, static_cast<int64_t>(turn.epoch) - 2);
  return __all_sync(kFullWarp, free);
}

// By a whole warp: tells every rank, the own one too, a word of the header each lane.
__device__ inline void send_words(const World& world, const Turn& turn, int64_t word) {
  const int lane = lane_idx();
  for (int peer = 0; peer < world.size; ++peer) {
    world.control[peer]->headers[world.rank][turn.slot].words[lane] = word;
  }
  __syncwarp();
  __threadfence_system();
  if (lane < world.size) {
    store_release(&world.control[lane]->headers[world.rank][turn.slot].tag, turn.tag);
  }
  __syncwarp();
}

// The same with the header of a call. `status` and `overflowed` override the header's.
__device__ inline void send_header(const Call& call, const Turn& turn, int64_t status, bool overflowed = false) {
  const int lane = lane_idx();
  send_words(call.world, turn, lane == kStatusWord ? status : lane == kOverflowedWord ? overflowed : call.header[lane]);
}

// By a whole warp: waits for the headers of all ranks (11). The verdict is the same function of them on every rank.
__device__ inline uint32_t verdict_of(const Call& call, const Turn& turn) {
  const World& world = call.world;
  const int lane = lane_idx();
  const Control& control = *world.control[world.rank];
  const bool arrived =
      lane >= world.size || wait_word(world, turn, lane, kWaitHeader, &control.headers[lane][turn.slot].tag, turn.tag);
  if (!__all_sync(kFullWarp, arrived)) {
    return kFailed;
  }
  __syncwarp();  // what one lane has seen come, all may read: a word each, of all headers at once
  static_assert(kHeaderWords == 32, "a word for each lane");
  bool refuses = false, differs = false, grows = false;
#pragma unroll 4
  for (int peer = 0; peer < world.size; ++peer) {
    const int64_t word = control.headers[peer][turn.slot].words[lane];
    differs |= lane < call.num_match && word != call.header[lane];
    grows |= lane == kStatusWord && word == kDoesNotFit;
    refuses |= lane == kStatusWord && word != kFine && word != kDoesNotFit;
  }
  if (__any_sync(kFullWarp, refuses)) {
    return kRefuse;
  }
  if (__any_sync(kFullWarp, differs)) {
    return kDisagree;
  }
  return __any_sync(kFullWarp, grows) ? kGrow : kGo;
}

__device__ inline bool is_opening(const Call& call) { return call.header[kOpeningWord] != 0; }

// Whether a call is part of one between nodes that was refused when it was opened. All ranks know it, and leave it out.
__device__ inline bool is_left_out(const Call& call) { return call.world.state->refused != 0 && !is_opening(call); }

// By a whole block, at the start of a call of one kernel: slots and header. Whether the slot may be written now; what
// peers sent may be read after the verdict only. `status` is the header's, or worse.
__device__ inline bool begin_call(const Call& call, const Turn& turn, int64_t status, bool overflowed) {
  __shared__ bool shared_begun;
  if (threadIdx.x < 32) {
    const bool begun = call.world.state->failed == 0 && !is_left_out(call) && slots_are_free(call.world, turn);
    if (begun && blockIdx.x == 0) {
      send_header(call, turn, status, overflowed);
    }
    if (threadIdx.x == 0) {
      shared_begun = begun;
    }
  }
  __syncthreads();
  return shared_begun;
}

__device__ inline bool begin_call(const Call& call, const Turn& turn) {
  return begin_call(call, turn, call.header[kStatusWord], false);
}

// By a whole block, at the start of a call of one kernel: slots, header, verdict.
__device__ inline uint32_t open_call(const Call& call, const Turn& turn, int64_t status, bool overflowed) {
  __shared__ uint32_t shared_verdict;
  const bool begun = begin_call(call, turn, status, overflowed);
  if (threadIdx.x < 32) {
    const uint32_t verdict = begun ? verdict_of(call, turn) : static_cast<uint32_t>(kFailed);
    if (threadIdx.x == 0) {
      shared_verdict = verdict;
    }
  }
  __syncthreads();
  return shared_verdict;
}

__device__ inline uint32_t open_call(const Call& call, const Turn& turn) {
  return open_call(call, turn, call.header[kStatusWord], false);
}

// The verdict for a warp that can work before it is there: what it puts into its own slot, and into outputs that are
// filled over where the call gives up, needs none. `worst`, in shared memory, is kGo at first and of all warps.
struct LateVerdict {
  uint32_t* worst;
  bool is_known = false;
  uint32_t value = kGo;

  // By a whole warp.
  __device__ uint32_t ask(const Call& call, const Turn& turn) {
    if (!is_known) {
      is_known = true;
      value = verdict_of(call, turn);
      if (lane_idx() == 0) {
        atomicMax(worst, value);
      }
    }
    return value;
  }
};

// Whether `rank` lets its peers read the rows of this call where they lie.
__device__ inline bool is_registered(const World& world, const Turn& turn, int rank) {
  return world.control[world.rank]->headers[rank][turn.slot].words[kRegisteredWord] != 0;
}

// -- tickets ------------------------------------------------------------------------------------------------------

// By a whole warp: the next number. Tickets decide who works, never where a row goes.
__device__ inline uint32_t warp_ticket(State* state) {
  uint32_t ticket = 0;
  if (lane_idx() == 0) {
    ticket = atomicAdd(&state->next_ticket, 1u);
  }
  return __shfl_sync(kFullWarp, ticket, 0);
}

// By a whole block.
__device__ inline uint32_t block_ticket(State* state) {
  __shared__ uint32_t shared_ticket;
  __syncthreads();
  if (threadIdx.x == 0) {
    shared_ticket = atomicAdd(&state->next_ticket, 1u);
  }
  __syncthreads();
  return shared_ticket;
}

// By one lane a peer: it may read a part from now on (3). The lane has seen the rows written: by itself, or by threads
// that it has met at a barrier since.
__device__ inline void post_flag(const World& world, const Turn& turn, int peer, int flag) {
  store_release(&world.control[peer]->flags[world.rank][turn.slot][flag], turn.tag);
}

// -- the end of a call --------------------------------------------------------------------------------------------

__device__ inline void fill_output(const Output& output) {
  if (output.data == nullptr) {
    return;
  }
  char* bytes = static_cast<char*>(output.data);
  for (int64_t i = threadIdx.x; i < output.num_bytes; i += blockDim.x) {
    bytes[i] = static_cast<char>(output.pattern >> (i % 8 * 8));
  }
}

// By a whole block. The first refusal stays until the host takes it; of those behind it only the number is kept. A host
// that waits finds the headers of its call apart.
__device__ inline void record_refusal(const Call& call, const Turn& turn, uint32_t verdict) {
  __shared__ bool shared_is_first;
  const World& world = call.world;
  HostRecord* record = world.record;
  if (threadIdx.x == 0) {
    shared_is_first = load_acquire(&record->refused.valid) == 0;
  }
  __syncthreads();
  const bool is_first = shared_is_first;
  for (int i = threadIdx.x; i < world.size * kHeaderWords; i += blockDim.x) {
    const int rank = i / kHeaderWords, word = i % kHeaderWords;
    const int64_t value = world.control[world.rank]->headers[rank][turn.slot].words[word];
    if (call.question != 0) {
      record->headers[rank][word] = value;
    }
    if (is_first) {
      record->refused_headers[rank][word] = value;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    if (is_first) {
      record->refused.values[0] = verdict;
      record->refused.values[1] = turn.epoch;
      store_release(&record->refused.valid, 1);
    }
    store_release(&record->num_refused, record->num_refused + 1);  // behind the record that it may count
  }
}

// By a whole block: whether this is the last one of its kernel to come here; what the others wrote is visible to it.
__device__ inline bool is_last_block(State* state) {
  __shared__ bool shared_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared_last = atomicAdd(&state->num_finished, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return shared_last;
}

// By the last block: makes the state ready for the next kernel.
__device__ inline void rewind_tickets(State* state) {
  state->next_ticket = 0;
  state->num_finished = 0;
  state->num_published = 0;
  state->num_counted = 0;
}

// By the last block, on every way out of a call (5, 6, 7): looks for aborts, fills what could not be made, posts done,
// answers the host and advances the epoch. `peers_read_caller`: peers read this rank's caller's memory (12). A call
// that is left out is filled and is no call to the others: it has sent no header, so nobody counts it.
__device__ inline void close_call(const Call& call, const Turn& turn, uint32_t verdict, const Output* outputs,
                                  int num_outputs, bool peers_read_caller) {
  __shared__ bool shared_failed;
  const World& world = call.world;
  State* state = world.state;
  const int lane = threadIdx.x;
  if (is_left_out(call)) {
    for (int i = 0; i < num_outputs; ++i) {
      fill_output(outputs[i]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      rewind_tickets(state);
    }
    return;
  }
  if (threadIdx.x < 32) {
    const bool aborted = lane < world.size && load_acquire(&world.control[world.rank]->abort[lane]) == turn.generation;
    const unsigned int aborts = __ballot_sync(kFullWarp, aborted);
    if (aborts != 0 && lane == 0) {
      give_up(world, turn, __ffs(aborts) - 1, kSawAbort, 0, 0);
    }
    __syncwarp();
    bool failed = load_acquire_gpu(&state->failed) != 0;
    if (!failed && lane < world.size) {
      __threadfence_system();
      store_release(&world.control[lane]->done[world.rank], turn.tag);
      if (peers_read_caller) {
        wait_done(world, turn, lane, turn.epoch);
      }
    }
    __syncwarp();
    failed = load_acquire_gpu(&state->failed) != 0;
    if (failed && lane < world.size) {  // (13): before the event fires
      store_release(&world.control[lane]->abort[world.rank], turn.generation);
    }
    if (lane == 0) {
      shared_failed = failed;
    }
  }
  __syncthreads();
  const bool failed = shared_failed;
  if (failed || verdict != kGo) {
    for (int i = 0; i < num_outputs; ++i) {
      fill_output(outputs[i]);
    }
  }
  if (!failed && verdict != kGo) {
    record_refusal(call, turn, verdict);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    state->epoch = turn.epoch + 1;
    state->outcome = failed ? static_cast<uint32_t>(kFailed) : verdict;
    rewind_tickets(state);
    if (is_opening(call)) {
      state->refused = verdict != kGo;
    }
    if (call.question != 0) {
      world.record->verdict = failed ? kFailed : verdict;
      world.record->epoch = turn.epoch;
      __threadfence_system();
      store_release(&world.record->answered, call.question);
    }
  }
}

// By every block of a call of one kernel, last thing.
__device__ inline void end_call(const Call& call, const Turn& turn, uint32_t verdict, const Output* outputs,
                                int num_outputs, bool peers_read_caller = false) {
  if (is_last_block(call.world.state)) {
    close_call(call, turn, verdict, outputs, num_outputs, peers_read_caller);
  }
}

// -- rows ---------------------------------------------------------------------------------------------------------

// Mutable memory, of a peer or of this rank: 16 bytes, past L1.
__device__ inline uint4 load_16(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline void store_16(void* address, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Chunk c of a source: which compact rows of it part q is, as (first, count).
struct Span {
  int64_t first;
  int64_t count;
};

__device__ inline Span part_of(int64_t begin, int64_t end, int part) {
  const int64_t size = (end - begin + kParts - 1) / kParts;
  const int64_t first = min64(begin + part * size, end);
  return {first, min64(first + size, end) - first};
}

__device__ inline Span part_of_tokens(int64_t num_tokens, int chunk, int part) {
  const int64_t size = chunk_tokens(num_tokens);
  return part_of(min64(chunk * size, num_tokens), min64((chunk + 1) * size, num_tokens), part);
}

__device__ inline int most_chunks(const int32_t* geometry, int size) {
  int most = 0;
  for (int rank = 0; rank < size; ++rank) {
    most = max(most, num_chunks(geometry[Geometry::kTokens + rank]));
  }
  return most;
}

}  // namespace moe_ep
