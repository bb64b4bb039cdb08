// The kernels of a rail, for any hop. A hop is how a kernel reaches the ranks of its rail:
//
//   put_signal(node, to, from, num_bytes, signal, value)   by a whole block: bytes of this rank's block to offset `to`
//       of the block of `node`, and behind them `value` to its signal at offset `signal`. `from` may be written again
//       once the other side has answered.
//   reach(node)                                            the block of `node`, if this GPU stores into it; or null.
//   signal(node, signal, value)                            by one thread: the signal alone.
//   seen(word)                                             by one thread: a signal of this rank's block; what was put
//       before the value that it returns is there.
//
// IpcHop (rail_ipc.cu) stores into memory that this GPU reaches, NvshmemHop (nvshmem/) goes through NVSHMEM.
#pragma once

#include <cstddef>

#include "common/check.h"
#include "exchange/device.cuh"
#include "internode/rail.h"

namespace moe_ep {

constexpr int kRailThreads = 512;

struct RailTurn {
  uint32_t generation;
  uint32_t round;
  uint64_t tag;
  int slot;
};

__device__ inline RailTurn rail_turn(const Rail& rail, const RailRound& round) {
  const uint32_t generation = rail.state->generation, number = rail.state->round + round.number;
  return {generation, number, tag_of(generation, number), static_cast<int>(number % kHopSlots)};
}

// Whether the exchange of the node has failed, or the call that was opened last was refused.
__device__ inline bool rail_leaves(const Rail& rail) {
  return load_acquire_gpu(&rail.node_state->failed) != 0 || load_acquire_gpu(&rail.node_state->refused) != 0;
}

// By one thread: polls an own signal until it has `expected` or a later tag of its generation; false where the limit
// passed or the exchange of the node has failed.
template <typename Hop>
__device__ bool rail_wait_signal(const Rail& rail, const Hop& hop, int64_t operation, int node, Phase phase,
                                 uint64_t* word, uint64_t expected) {
  uint64_t began = 0;
  for (uint32_t poll = 0;; ++poll) {
    const uint64_t seen = hop.seen(word);
    if (seen >> 32 == expected >> 32 && seen >= expected) {
      return true;
    }
    if (poll % 64 != 63) {
      continue;
    }
    const uint64_t now = now_ns();
    began = began == 0 ? now : began;
    if (rail_leaves(rail)) {
      return false;
    }
    if (now - began > rail.timeout_ns) {
      report_failure(rail.node_state, rail.record, operation, static_cast<uint32_t>(expected) - 1, node, phase,
                     expected, seen);
      return false;
    }
    __nanosleep(32);
  }
}

// By a whole block: until every node has taken the round that used this one's slot before; false where one did not.
template <typename Hop>
__device__ bool rail_wait_free(const Rail& rail, const Hop& hop, const RailRound& round, const RailTurn& turn) {
  RailSignals* signals = reinterpret_cast<RailSignals*>(rail.block);
  bool is_free = !rail_leaves(rail);
  for (int node = threadIdx.x; node < rail.num_nodes && is_free && turn.round >= kHopSlots; node += blockDim.x) {
    is_free =
        node == rail.node || rail_wait_signal(rail, hop, round.operation, node, kWaitRoundTaken, &signals->taken[node],
                                              tag_of(turn.generation, turn.round - kHopSlots));
  }
  return __syncthreads_and(is_free) != 0;
}

__device__ inline int64_t rows_of_chunk(int64_t num_rows) { return (num_rows + kHopChunks - 1) / kHopChunks; }

// By threads `first`, `first + step` ...: bytes in pieces of 16, several of a thread under way at once.
__device__ inline void copy_pieces(char* to, const char* from, int64_t num_bytes, int first, int step) {
  constexpr int kBatch = 8;
  for (int64_t begin = 0; begin < num_bytes; begin += kBatch * step * 16) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t at = begin + (i * step + first) * 16;
      if (at < num_bytes) {
        values[i] = load_16(from + at);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t at = begin + (i * step + first) * 16;
      if (at < num_bytes) {
        store_16(to + at, values[i]);
      }
    }
  }
}

// By a whole block: rows of a chunk, side by side, to `out`.
__device__ inline void gather_rows(const RailRows& in, const int32_t* token, int64_t num_rows, int64_t row_bytes,
                                   char* out) {
  for (int64_t row = warp_idx(); row < num_rows; row += kRailThreads / 32) {
    char* to = out + row * row_bytes;
    for (int kind = 0; kind < kRowKinds; ++kind) {
      copy_pieces(to, in.x[kind] + token[row] * in.stride_bytes[kind], in.bytes[kind], lane_idx(), 32);
      to += in.bytes[kind];
    }
  }
}

// Blocks take the chunks of all nodes in turn, the next node's first, so that all links are used at once.
template <typename Hop>
__global__ void __launch_bounds__(kRailThreads, 1)
    moe_ep_rail_send(const __grid_constant__ Rail rail, const __grid_constant__ Hop hop,
                     const __grid_constant__ RailRound round, const __grid_constant__ RailRows in) {
  const RailTurn turn = rail_turn(rail, round);
  RailSignals* signals = reinterpret_cast<RailSignals*>(rail.block);
  const int others = rail.num_nodes - 1;
  // Of all nodes: the last round in this slot may have laid its flows out otherwise.
  if (!rail_wait_free(rail, hop, round, turn)) {
    return;
  }
  for (int item = blockIdx.x; item < others * kHopChunks; item += gridDim.x) {
    const int node = (rail.node + 1 + item % others) % rail.num_nodes, chunk = item / others;
    const int32_t* first = round.first_out + node * round.num_rounds + round.number;
    const int64_t num_rows = first[1] - first[0], size = rows_of_chunk(num_rows);
    const int64_t begin = min64(chunk * size, num_rows), count = min64(begin + size, num_rows) - begin;
    if (count == 0) {
      continue;
    }
    const int64_t offset = begin * round.row_bytes;
    const int64_t to = rail_inbox(rail, turn.slot) + rail.node * round.flow_bytes + offset;
    const int64_t signal = reinterpret_cast<char*>(&signals->arrived[turn.slot][rail.node][chunk]) - rail.block;
    char* direct = in.token == nullptr ? nullptr : hop.reach(node);
    char* from = rail.block + rail_outbox(rail, turn.slot) + node * round.flow_bytes + offset;
    if (in.token != nullptr) {
      const int32_t* token = in.token + first[0] + begin;
      gather_rows(in, token, count, round.row_bytes, direct == nullptr ? from : direct + to);
    }
    __threadfence_system();  // a network card reads the outbox
    __syncthreads();
    if (direct == nullptr) {
      hop.put_signal(node, to, from, count * round.row_bytes, signal, turn.tag);
    } else if (threadIdx.x == 0) {
      hop.signal(node, signal, turn.tag);
    }
    if (threadIdx.x == 0) {
      atomicAdd(&rail.state->sent_bytes, static_cast<unsigned long long>(count * round.row_bytes));
    }
    __syncthreads();
  }
}

// -- openings -----------------------------------------------------------------------------------------------------

// What the ranks of a rail say of a call.
struct Heard {
  int64_t status;  // what this rank tells its node
  int64_t node;    // 1 + the node that refuses or differs, 0 for none and for this one
  int64_t field;   // of what differs: number of the word, and its value there
  int64_t value;
};

// By one warp, when all headers have come: of refusals the one in the lowest node counts, else of differences.
__device__ inline Heard hear(const Rail& rail, const RailSignals* signals, int slot, const Call& call) {
  const int lane = lane_idx();
  Heard heard = {kFine, 0, 0, 0};
  for (int node = 0; node < rail.num_nodes; ++node) {
    const volatile int64_t* words = signals->headers[slot][node].words;
    int64_t word = call.header[lane];  // a kernel's argument: nothing volatile, which a choice of the two would be
    if (node != rail.node) {
      word = words[lane];
    }
    const int64_t status = __shfl_sync(kFullWarp, word, kStatusWord);
    const unsigned int differs = __ballot_sync(kFullWarp, lane < call.num_match && word != call.header[lane]);
    const int field = differs == 0 ? 0 : __ffs(differs) - 1;
    const int64_t value = __shfl_sync(kFullWarp, word, field);
    if (status != kFine) {
      return {status, node == rail.node ? 0 : node + 1, 0, 0};
    }
    if (differs != 0 && heard.status == kFine) {
      heard = {kDiffersElsewhere, node + 1, field, value};
    }
  }
  return heard;
}

// By the whole block: sends this rank's header along the rail; whether all the others' have come.
template <typename Hop>
__device__ bool headers_come(const Rail& rail, const Hop& hop, const Call& call, int slot, uint64_t tag) {
  RailSignals* signals = reinterpret_cast<RailSignals*>(rail.block);
  const auto offset = [&](const void* at) { return static_cast<const char*>(at) - rail.block; };
  RailSignals::Header* sent = &signals->sent[slot];
  if (threadIdx.x < kHeaderWords) {
    sent->words[threadIdx.x] = call.header[threadIdx.x];
  }
  __threadfence_system();  // a network card reads it
  __syncthreads();
  for (int i = 1; i < rail.num_nodes; ++i) {
    const int node = (rail.node + i) % rail.num_nodes;
    hop.put_signal(node, offset(&signals->headers[slot][rail.node]), reinterpret_cast<const char*>(sent), sizeof(*sent),
                   offset(&signals->opened[slot][rail.node]), tag);
  }
  bool came = true;
  for (int node = threadIdx.x; node < rail.num_nodes && came; node += kRailThreads) {
    came = node == rail.node ||
           rail_wait_signal(rail, hop, call.world.operation, node, kWaitOpening, &signals->opened[slot][node], tag);
  }
  return __syncthreads_and(came) != 0;
}

template <typename Hop>
__global__ void __launch_bounds__(kRailThreads, 1)
    moe_ep_rail_open(const __grid_constant__ Rail rail, const __grid_constant__ Hop hop,
                     const __grid_constant__ Call call) {
  __shared__ uint32_t shared_verdict;
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const uint32_t opening = rail.state->opening;
  const int slot = opening % kHopSlots;
  if (threadIdx.x == 0) {
    world.state->refused = 0;  // of the call before, whose parts have ended
    shared_verdict = kFailed;
  }
  __threadfence();
  const bool goes = __syncthreads_and(load_acquire_gpu(&world.state->failed) == 0) != 0;
  if (goes && headers_come(rail, hop, call, slot, tag_of(rail.state->generation, opening)) && threadIdx.x < 32 &&
      slots_are_free(world, turn)) {
    const Heard heard = hear(rail, reinterpret_cast<const RailSignals*>(rail.block), slot, call);
    const int lane = lane_idx();
    int64_t word = call.header[lane];
    word = lane == kStatusWord ? heard.status : lane == kOpeningWord ? opening + 1 : word;
    word = lane == kElsewhereWord ? heard.node | heard.field << kElsewhereFieldShift : word;
    word = lane == kElsewhereValueWord ? heard.value : word;
    send_words(world, turn, word);
    const uint32_t verdict = verdict_of(call, turn);
    if (lane == 0) {
      shared_verdict = verdict;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    rail.state->opening = opening + 1;
  }
  close_call(call, turn, shared_verdict, nullptr, 0, false);
}

// -- rounds -------------------------------------------------------------------------------------------------------

template <typename Hop>
__global__ void moe_ep_rail_wait_free(const __grid_constant__ Rail rail, const __grid_constant__ Hop hop,
                                      const __grid_constant__ RailRound round) {
  rail_wait_free(rail, hop, round, rail_turn(rail, round));
}

template <typename Hop>
__global__ void __launch_bounds__(kRailThreads)
    moe_ep_rail_wait(const __grid_constant__ Rail rail, const __grid_constant__ Hop hop,
                     const __grid_constant__ RailRound round) {
  const RailTurn turn = rail_turn(rail, round);
  RailSignals* signals = reinterpret_cast<RailSignals*>(rail.block);
  const bool leaves = rail_leaves(rail);
  for (int item = threadIdx.x; item < rail.num_nodes * kHopChunks && !leaves; item += kRailThreads) {
    const int node = item / kHopChunks, chunk = item % kHopChunks;
    const int64_t num_rows = round.num_in[node * round.num_rounds + round.number];
    if (node != rail.node && chunk * rows_of_chunk(num_rows) < num_rows) {
      rail_wait_signal(rail, hop, round.operation, node, kWaitRoundRows, &signals->arrived[turn.slot][node][chunk],
                       turn.tag);
    }
  }
}

template <typename Hop>
__global__ void moe_ep_rail_take(const __grid_constant__ Rail rail, const __grid_constant__ Hop hop,
                                 const __grid_constant__ RailRound round) {
  const RailTurn turn = rail_turn(rail, round);
  const RailSignals* signals = reinterpret_cast<const RailSignals*>(rail.block);
  const bool leaves = rail_leaves(rail);
  for (int node = threadIdx.x; node < rail.num_nodes && !leaves; node += blockDim.x) {
    if (node != rail.node) {
      hop.signal(node, reinterpret_cast<const char*>(&signals->taken[rail.node]) - rail.block, turn.tag);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && round.number == round.num_rounds - 1 && !leaves) {
    rail.state->round = turn.round + 1;
  }
}

// Before the first call: a kernel that is loaded while others wait could wait for them.
template <typename Hop>
void load_rail_kernels() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(&moe_ep_rail_open<Hop>), reinterpret_cast<const void*>(&moe_ep_rail_send<Hop>),
        reinterpret_cast<const void*>(&moe_ep_rail_wait_free<Hop>),
        reinterpret_cast<const void*>(&moe_ep_rail_wait<Hop>), reinterpret_cast<const void*>(&moe_ep_rail_take<Hop>)}) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "internode: loading the kernels");
  }
}

template <typename Hop>
void launch_rail_open(const Rail& rail, const Hop& hop, const Call& call, cudaStream_t stream) {
  moe_ep_rail_open<Hop><<<1, kRailThreads, 0, stream>>>(rail, hop, call);
  check_cuda(cudaGetLastError(), "internode: the launch of an opening");
}

template <typename Hop>
void launch_rail_send(const Rail& rail, const Hop& hop, const RailRound& round, const RailRows& rows, int num_sms,
                      cudaStream_t stream) {
  if (rail.num_nodes > 1) {
    moe_ep_rail_send<Hop><<<num_sms, kRailThreads, 0, stream>>>(rail, hop, round, rows);
    check_cuda(cudaGetLastError(), "internode: the launch of a send");
  }
}

template <typename Hop>
void launch_rail_wait_free(const Rail& rail, const Hop& hop, const RailRound& round, cudaStream_t stream) {
  moe_ep_rail_wait_free<Hop><<<1, 256, 0, stream>>>(rail, hop, round);
  check_cuda(cudaGetLastError(), "internode: the launch of a wait");
}

template <typename Hop>
void launch_rail_wait(const Rail& rail, const Hop& hop, const RailRound& round, cudaStream_t stream) {
  moe_ep_rail_wait<Hop><<<1, kRailThreads, 0, stream>>>(rail, hop, round);
  check_cuda(cudaGetLastError(), "internode: the launch of a wait");
}

template <typename Hop>
void launch_rail_take(const Rail& rail, const Hop& hop, const RailRound& round, cudaStream_t stream) {
  moe_ep_rail_take<Hop><<<1, 256, 0, stream>>>(rail, hop, round);
  check_cuda(cudaGetLastError(), "internode: the launch of an answer");
}

}  // namespace moe_ep
