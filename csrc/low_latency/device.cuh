// Device side of the low-latency calls: words, waits that may lose a peer, how a call begins and ends. Ranks meet by
// acquire and release at system scope alone, and by words that stand for nothing but their value; nothing is zeroed.
//
// All is written against a hop, which is how a kernel reaches the other ranks. It has static functions only:
//
//   kPuts                   whether this GPU may not store into the memory of some rank, whose entry in
//                           `LowLatencyCall::memory` is null then: a far one. The following is for such ranks.
//   put(to, from, num_bytes, word, value, peer)   by a whole warp: bytes of this rank's memory into that of `peer`,
//                           and behind them `value` to a word there. `from` may be written again once the peer has
//                           acknowledged the call.
//   signal(word, value, peer)   by one thread: a word alone, in no order with others; `fence()` before it gives one.
//   settle()                by one thread: until all that this rank has put is there.
//   seen(word)              by one thread: a word of this rank's memory.
//   arrived(word)           by the thread that has seen it: what was written before the word can be read, if it was
//                           released, or put with it.
//
// Memory of all ranks is laid out alike, so `to` and `word` are the addresses that the place has in this rank's memory.
// StoreHop reaches every rank; PutHop (nvshmem/low_latency_nvshmem.cu) puts over NVSHMEM what it cannot store.
#pragma once

#include "exchange/device.cuh"
#include "low_latency/low_latency.h"

namespace moe_ep {

struct StoreHop {
  static constexpr bool kPuts = false;
  static __device__ uint64_t seen(const uint64_t* word) { return load_acquire(word); }
  static __device__ void arrived(const uint64_t*) {}
};

// One call as a block sees it.
struct LowLatencyTurn {
  uint32_t generation;
  uint32_t epoch;
  int slot;
};

__device__ inline LowLatencyTurn low_latency_turn(const LowLatencyCall& call) {
  const uint32_t epoch = call.sends ? call.state->epoch : static_cast<uint32_t>(*call.ticket);
  return {call.state->generation, epoch, static_cast<int>(epoch % 2)};
}

__device__ inline uint64_t word_of(const LowLatencyTurn& turn, uint32_t value) {
  return static_cast<uint64_t>(turn.generation) << (kEpochBits + kValueBits) |
         static_cast<uint64_t>(turn.epoch + 1) << kValueBits | value;
}
__device__ inline uint32_t value_of(uint64_t word) { return static_cast<uint32_t>(word) & kMaxPairs; }
__device__ inline bool same_call(uint64_t a, uint64_t b) { return a >> kValueBits == b >> kValueBits; }

// Whether a word is of the call of `expected`, or of a later one of its generation.
__device__ inline bool is_since(uint64_t word, uint64_t expected) {
  constexpr int kBits = kEpochBits + kValueBits;
  return word >> kBits == expected >> kBits && static_cast<int32_t>(static_cast<uint32_t>(word >> kValueBits) -
                                                                    static_cast<uint32_t>(expected >> kValueBits)) >= 0;
}

// -- where things lie ---------------------------------------------------------------------------------------------

template <typename Hop>
__device__ inline bool is_far(const LowLatencyCall& call, int rank) {
  return Hop::kPuts && call.memory[rank] == nullptr;
}

// Where the memory of `rank` begins; of a far one, that of this rank, which is laid out alike.
template <typename Hop>
__device__ inline char* memory_of(const LowLatencyCall& call, int rank) {
  return call.memory[is_far<Hop>(call, rank) ? call.world.rank : rank];
}

template <typename Hop = StoreHop>
__device__ inline LowLatencyControl* control_of(const LowLatencyCall& call, int rank) {
  return reinterpret_cast<LowLatencyControl*>(memory_of<Hop>(call, rank));
}

// What `source` writes into the memory of `rank`.
template <typename Hop = StoreHop>
__device__ inline uint64_t* words_of(const LowLatencyCall& call, int rank, int slot, int source) {
  return reinterpret_cast<uint64_t*>(memory_of<Hop>(call, rank) + kLowLatencyControlBytes) +
         (slot * call.world.size + source) * call.words_a_source;
}
__device__ inline char* rows_of(const LowLatencyCall& call, int rank, int slot, int source) {
  return call.memory[rank] + kLowLatencyControlBytes +
         2 * call.world.size * call.words_a_source * static_cast<int64_t>(sizeof(uint64_t)) +
         (slot * call.world.size + source) * call.bytes_a_source;
}

// Where this rank lays rows for a far one, side by side as they will lie there: two slots behind those of its own rows,
// with a part for each destination.
__device__ inline char* outbox_of(const LowLatencyCall& call, int slot, int to) {
  return rows_of(call, call.world.rank, 2 + slot, to);
}

// Where this rank writes its rows for `rank`.
template <typename Hop>
__device__ inline char* rows_to(const LowLatencyCall& call, int rank, int slot) {
  return is_far<Hop>(call, rank) ? outbox_of(call, slot, rank) : rows_of(call, rank, slot, call.world.rank);
}

// Words of a dispatch: rows of each local expert, then one word a row.
__device__ inline uint64_t* row_words(uint64_t* words, const LowLatencyShape& shape) {
  return words + shape.most_local;
}

// By one thread: a word in the memory of `peer`; what this thread has seen written is there before it where
// `releases`.
template <typename Hop>
__device__ inline void post(const LowLatencyCall& call, int peer, uint64_t* word, uint64_t value, bool releases) {
  if constexpr (Hop::kPuts) {
    if (is_far<Hop>(call, peer)) {
      if (releases) {
        __threadfence_system();
      }
      Hop::fence();  // an older value of the word must not come behind this one
      Hop::signal(word, value, peer);
      return;
    }
  }
  if (releases) {
    store_release(word, value);
  } else {
    store_relaxed(word, value);
  }
}

// By a whole warp, of which each lane has seen the row written: a row, or a part of one, that lies in the outbox, into
// its place in the memory of far `peer`, and its word behind it.
template <typename Hop>
__device__ inline void put_row(const LowLatencyCall& call, const LowLatencyTurn& turn, int peer, char* row,
                               int64_t num_bytes, uint64_t* word, uint64_t value) {
  char* to = rows_of(call, call.world.rank, turn.slot, call.world.rank) + (row - outbox_of(call, turn.slot, peer));
  __threadfence_system();  // a network card reads the outbox
  __syncwarp();
  Hop::put(to, row, num_bytes, word, value, peer);
}

// By a whole warp: 16-byte units from one place to another, a batch of reads under way at a time.
template <int kBatch>
__device__ void copy_units(char* to, const char* from, int num_units) {
  for (int first = lane_idx(); first < num_units; first += 32 * kBatch) {
    uint4 batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + 32 * i < num_units) {
        batch[i] = load_16(from + (first + 32 * i) * kUnitBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + 32 * i < num_units) {
        store_16(to + (first + 32 * i) * kUnitBytes, batch[i]);
      }
    }
  }
}

// -- waits --------------------------------------------------------------------------------------------------------

// Masks and failures stand for nothing but their own value, so loads of them are under way beside others. What a rank
// writes around a mask is looked at behind a fence only (is_last, take_lost).
__device__ inline int32_t mask_of(const LowLatencyCall& call, int peer) {
  return static_cast<int32_t>(load_relaxed_gpu(reinterpret_cast<const uint32_t*>(call.mask + peer)));
}

__device__ inline bool has_failed(const LowLatencyCall& call) {
  return load_relaxed_gpu(&call.world.state->failed) != 0;
}

// A peer that is missing after the limit: lost, where peers may be, and otherwise the end of this exchange.
__device__ inline void miss(const LowLatencyCall& call, const LowLatencyTurn& turn, int peer, Phase phase,
                            uint64_t expected, uint64_t seen) {
  if (call.enable_shrink) {
    // Of both slots: the kernel that receives the other one may be running, and its blocks see the mask change too.
    // Before and behind the mask: whoever sees it finds the word, also where that was taken in between.
    const auto tell = [&] {
      atomicExch(&call.state->lost[0], 1u);
      atomicExch(&call.state->lost[1], 1u);
      __threadfence();
    };
    tell();
    atomicExch(&call.mask[peer], kLost);
    __threadfence();
    tell();
    return;
  }
  give_up(call.world, {turn.generation, turn.epoch, 0, turn.slot}, peer, phase, expected, seen);
}

// Whether this rank waits for `peer`. For itself it does though it has masked itself: its own ack keeps its next call
// in a slot out of the words of the last one, which may be running on another stream.
__device__ inline bool is_awaited(const LowLatencyCall& call, int peer, int32_t mask) {
  return mask == kOpen || (mask == kMasked && peer == call.world.rank);
}

// Polls a word that `peer` writes until `ready(value)`: false where the peer is masked or lost, or the exchange failed.
template <typename Hop, typename Ready>
__device__ bool wait_for_peer(const LowLatencyCall& call, const LowLatencyTurn& turn, int peer, Phase phase,
                              const uint64_t* word, uint64_t expected, Ready ready, uint64_t* seen) {
  uint64_t began = 0;
  for (uint32_t round = 0;; ++round) {
    *seen = Hop::seen(word);
    if (ready(*seen)) {
      Hop::arrived(word);
      return true;
    }
    if (round % 32 != 31) {
      continue;
    }
    if (has_failed(call) || !is_awaited(call, peer, mask_of(call, peer))) {
      return false;
    }
    const uint64_t now = now_ns();
    began = began == 0 ? now : began;
    if (now - began > call.world.timeout_ns) {
      miss(call, turn, peer, phase, expected, *seen);
      return false;
    }
  }
}

// The same until the word is of the call of `expected` or of a later one, where `seen` is a first look at it.
template <typename Hop>
__device__ inline bool wait_since(const LowLatencyCall& call, const LowLatencyTurn& turn, int peer, Phase phase,
                                  const uint64_t* word, uint64_t expected, uint64_t* seen) {
  if (is_since(*seen, expected)) {
    Hop::arrived(word);
    return true;
  }
  return wait_for_peer<Hop>(
      call, turn, peer, phase, word, expected, [=](uint64_t value) { return is_since(value, expected); }, seen);
}

// Until `peer` has written the word of this call; its value, or `otherwise`.
template <typename Hop>
__device__ inline uint32_t wait_value(const LowLatencyCall& call, const LowLatencyTurn& turn, int peer, Phase phase,
                                      const uint64_t* word, uint32_t otherwise) {
  const uint64_t expected = word_of(turn, 0);
  uint64_t seen;
  const bool arrived = wait_for_peer<Hop>(
      call, turn, peer, phase, word, expected, [=](uint64_t value) { return same_call(value, expected); }, &seen);
  return arrived ? value_of(seen) : otherwise;
}

// The longest wait for a peer, for the caller's statistics.
__device__ inline void charge_wait(const LowLatencyCall& call, const LowLatencyTurn& turn, int peer, uint64_t began) {
  if (call.stats != nullptr && peer != call.world.rank) {
    atomicMax(reinterpret_cast<unsigned long long*>(&call.state->waited_ns[turn.slot][peer]),
              static_cast<unsigned long long>(now_ns() - began));
  }
}

// Ranks are gone through by the first warp of a block, a lane each. Inside a node there are no more of them than lanes.
static_assert(kMaxRanks <= 32, "a lane for each rank of a node");

// -- the begin of sending -----------------------------------------------------------------------------------------

// By a whole block: waits for every ack of the last call in this slot, and says to whom rows go. False after a failure.
template <typename Hop>
__device__ inline bool begin_sending(const LowLatencyCall& call, const LowLatencyTurn& turn,
                                     int32_t (&shared_mask)[kMaxLowLatencyRanks]) {
  __shared__ bool shared_fine;
  if (threadIdx.x < 32) {
    bool fine = !has_failed(call);
    for (int peer = threadIdx.x; peer < call.world.size; peer += 32) {
      const uint64_t sent = call.state->sent[turn.slot][peer];
      const uint64_t* ack = &control_of(call, call.world.rank)->acks[turn.slot][peer];
      int32_t mask = mask_of(call, peer);
      uint64_t seen = Hop::seen(ack);  // last of all that is under way at once, for it acquires; mostly it is there
      if (sent != 0 && is_awaited(call, peer, mask)) {
        wait_since<Hop>(call, turn, peer, kWaitDone, ack, sent, &seen);  // of this call, where a block is late
        if (!is_since(seen, sent)) {
          mask = mask_of(call, peer);
          fine = fine && !has_failed(call);
        }
      }
      shared_mask[peer] = mask;
      if constexpr (!Hop::kPuts) {
        break;  // there are no more
      }
    }
    fine = __all_sync(kFullWarp, fine);
    if (threadIdx.x == 0) {
      shared_fine = fine;
    }
  }
  __syncthreads();
  return shared_fine;
}

// By one lane a peer: what this rank says to it first. It holds for no rows: those have words of their own.
template <typename Hop>
__device__ inline void greet(const LowLatencyCall& call, const LowLatencyTurn& turn, int peer, int32_t mask,
                             uint32_t value) {
  if (mask != kLost) {
    post<Hop>(call, peer, &control_of<Hop>(call, peer)->greetings[turn.slot][call.world.rank],
              word_of(turn, mask == kMasked ? value | kMaskedBit : value), false);
  }
}

// -- the begin of receiving ---------------------------------------------------------------------------------------

// The first report stays until the host takes it; several threads, also of two kernels, may come with one.
__device__ inline void report(const LowLatencyCall& call, LowLatencyFault kind, int64_t a, int64_t b, int64_t c) {
  HostRecord::Fault& fault = call.world.record->low_latency;
  if (load_acquire(&fault.valid) != 0 || atomicExch(&call.state->is_reporting, 1u) != 0) {
    return;
  }
  __threadfence();
  if (load_acquire(&fault.valid) == 0) {
    const int64_t values[5] = {kind, call.world.operation, a, b, c};
    for (int i = 0; i < 5; ++i) {
      fault.values[i] = values[i];
    }
    store_release(&fault.valid, 1);
  }
  __threadfence();
  atomicExch(&call.state->is_reporting, 0u);
}

// By a whole block: hears every peer; `shared_open` says from whom rows come. False where the call is given up: after
// a failure, if a rank refuses it, or if the ranks differ.
template <typename Hop>
__device__ inline bool begin_receiving(const LowLatencyCall& call, const LowLatencyTurn& turn, bool reports,
                                       bool (&shared_open)[kMaxLowLatencyRanks]) {
  __shared__ bool shared_fine;
  if (threadIdx.x < 32) {
    bool fine = !has_failed(call);
    for (int peer = threadIdx.x; peer < call.world.size; peer += 32) {
      const uint64_t expected = word_of(turn, 0);
      const uint64_t* word = &control_of(call, call.world.rank)->greetings[turn.slot][peer];
      bool open = mask_of(call, peer) == kOpen;
      uint64_t seen = load_relaxed(word);
      if (open) {
        // A peer that has masked this rank does not wait for it, and may be ahead by any number of calls.
        open = wait_since<Hop>(call, turn, peer, kWaitHeader, word, expected, &seen);
        if (open) {
          const uint32_t value = value_of(seen);
          open = same_call(seen, expected) && (value & kMaskedBit) == 0;
          const bool is_alike = !open || value == call.print;
          fine = fine && is_alike;
          if (!is_alike && reports) {
            report(call, (value & kRefusedBit) != 0 ? kPeerRefused : kDisagreement, peer, 0, 0);
          }
        } else {
          fine = fine && !has_failed(call);
        }
      }
      shared_open[peer] = open;
      if constexpr (!Hop::kPuts) {
        break;  // there are no more
      }
    }
    fine = __all_sync(kFullWarp, fine);
    if (threadIdx.x == 0) {
      shared_fine = fine;
    }
  }
  __syncthreads();
  return shared_fine;
}

// -- the end ------------------------------------------------------------------------------------------------------

// By a whole block: whether it is the last of its kernel to count itself; what the others wrote is visible to it then.
__device__ inline bool is_last(const LowLatencyCall& call, uint32_t* counter) {
  __shared__ bool shared_last;
  if (call.enable_shrink) {
    __threadfence();  // between the masks that a thread has looked at and what the last block looks for (take_lost)
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    shared_last = before == gridDim.x - 1;
  }
  __syncthreads();
  return shared_last;
}

// By the last block: whether a peer was lost since this was asked last, and the results have to be made anew.
__device__ inline bool take_lost(const LowLatencyCall& call, const LowLatencyTurn& turn) {
  __shared__ bool shared_lost;
  if (!call.enable_shrink) {
    return false;
  }
  __threadfence();  // between the masks that were looked at and the word
  __syncthreads();
  if (threadIdx.x == 0) {
    shared_lost = atomicExch(&call.state->lost[turn.slot], 0u) != 0;
  }
  __syncthreads();
  return shared_lost;
}

// How things stand at the end, as the last block sees it: whether the exchange has failed, and the mask of peer number
// `threadIdx.x`. Both loads are under way together.
struct LowLatencyEnd {
  bool has_failed;
  int32_t mask;
};
__device__ inline LowLatencyEnd look_at_end(const LowLatencyCall& call) {
  const bool is_peer = threadIdx.x < static_cast<unsigned int>(call.world.size);
  const int32_t mask = is_peer ? mask_of(call, threadIdx.x) : kLost;
  return {has_failed(call), mask};
}

// By a whole block: whether a peer may acknowledge rows that this rank has put, and that it did not wait for, because
// it has masked this rank. Where it does not look for them, its greeting says so, or is of a later call already.
__device__ inline bool has_unread(const LowLatencyCall& call, const LowLatencyTurn& turn, int32_t mask) {
  bool is_unread = false;
  if (mask == kOpen) {
    const uint64_t seen = load_acquire(&control_of(call, call.world.rank)->greetings[turn.slot][threadIdx.x]);
    is_unread = !same_call(seen, word_of(turn, 0)) || (value_of(seen) & kMaskedBit) != 0;
  }
  return __syncthreads_or(is_unread) != 0;
}

// By the last block of a kernel that sent, when no block does any more. To a masked rank nothing went: once it is taken
// in again, what it has to have read is what was sent there before.
__device__ inline void end_sending(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyEnd& end) {
  LowLatencyState* state = call.state;
  const int peer = threadIdx.x;
  if (peer < call.world.size && (end.mask == kLost || is_awaited(call, peer, end.mask))) {
    state->sent[turn.slot][peer] = end.mask == kLost ? 0 : word_of(turn, 0);
  }
  if (threadIdx.x == 0) {
    state->num_sent = 0;
    state->epoch = turn.epoch + 1;
    if (call.ticket != nullptr) {
      *call.ticket = turn.epoch;
    }
  }
}

// By the last block of a kernel that received, when no block reads any more: the peers may write this slot again. The
// own ack comes last too: the next call in the slot may be running on another stream, and counts in the same words.
template <typename Hop>
__device__ inline void end_receiving(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyEnd& end,
                                     bool is_given_up) {
  const int peer = threadIdx.x;
  if constexpr (Hop::kPuts) {
    if (has_unread(call, turn, end.mask) || is_given_up) {
      if (threadIdx.x == 0 && !end.has_failed) {
        Hop::settle();  // otherwise rows that nobody waits for could come over those of the next call in the slot
      }
    }
  }
  if (peer < call.world.size && call.stats != nullptr) {
    uint64_t& waited = call.state->waited_ns[turn.slot][peer];
    call.stats[peer] += (waited + 500) / 1000;
    waited = 0;
  }
  if (threadIdx.x == 0) {
    call.state->num_received[turn.slot] = 0;
  }
  __syncthreads();
  if (end.mask != kLost && !end.has_failed) {
    post<Hop>(call, peer, &control_of<Hop>(call, peer)->acks[turn.slot][call.world.rank], word_of(turn, 0), true);
  }
}

}  // namespace moe_ep
