// What the kernels that move rows along a plan share: the order of their tickets, and rows through registers.
#pragma once

#include "check.h"
#include "exchange_device.cuh"
#include "intranode_move.h"

// Tickets of a call, in steps: step i publishes chunk i of the own tokens and pulls chunk i - kLead of every source, so
// that publishing runs ahead of the peers' pulls. The number of tickets in a step and the number of steps are the same
// on all ranks, so the ticket that publishes a chunk is lower than those that wait for it, everywhere (8, 9).

namespace moe_ep {

constexpr int kLead = 6;
constexpr int kTailTickets = 32;

// -- what a ticket means --------------------------------------------------------------------------------------------

struct Work {
  enum Kind { kPublish, kPull, kPad, kTail, kNothing, kEnd } kind;
  int source;
  int chunk;
  int part;  // of a chunk; number of the expert or of the tail's part
};

__device__ inline Work work_of(const World& world, const MoveInput& in, uint32_t ticket, int most) {
  const int size = world.size, lead = size == 1 ? 0 : kLead;
  const uint32_t publishes = size == 1 ? 0 : kParts, per_step = publishes + kParts * size;
  const uint32_t step = ticket / per_step, place = ticket % per_step;
  if (step < static_cast<uint32_t>(most + lead)) {
    if (place < publishes) {
      return {static_cast<int>(step) < most ? Work::kPublish : Work::kNothing, world.rank, static_cast<int>(step),
              static_cast<int>(place)};
    }
    const int pull = place - publishes, chunk = static_cast<int>(step) - lead;
    const int source = (world.rank + 1 + pull / kParts) % size;  // the own rows last
    return {chunk < 0 ? Work::kNothing : Work::kPull, source, chunk, pull % kParts};
  }
  const int rest = ticket - per_step * (most + lead);
  if (in.expert_major && rest < in.num_local) {
    return {Work::kPad, 0, 0, rest};
  }
  const int tail = rest - (in.expert_major ? in.num_local : 0);
  return {tail < kTailTickets ? Work::kTail : Work::kEnd, 0, 0, tail};
}

// The compact rows of a pull.
__device__ inline Span rows_of(const World& world, const MoveInput& in, const Work& work) {
  const int32_t* chunk_rows =
      in.geometry + Geometry::chunk_rows(world.size) + work.source * (kMaxChunks + 1) + work.chunk;
  return part_of(chunk_rows[0], chunk_rows[1], work.part);
}

// The rows of a pad or tail ticket.
__device__ inline Span padding_of(const World& world, const MoveInput& in, const Work& work) {
  if (work.kind == Work::kPad) {
    const int32_t* offsets = in.geometry + Geometry::expert_offsets(world.size);
    const int32_t* counts = in.geometry + Geometry::expert_counts(world.size, in.num_local);
    const int64_t first = offsets[work.part] + counts[work.part];
    return {first, min64(offsets[work.part + 1], in.num_rows) - first};
  }
  const int64_t begin = min64(in.geometry[Geometry::kRows], in.num_rows), length = in.num_rows - begin;
  const int64_t first = begin + length * work.part / kTailTickets;
  return {first, begin + length * (work.part + 1) / kTailTickets - first};
}

// By a whole warp: until source `work.source` has published the chunk.
__device__ inline bool chunk_arrived(const World& world, const Turn& turn, const Work& work) {
  if (work.source == world.rank) {
    return true;
  }
  bool arrived = true;
  if (lane_idx() < kParts) {
    const uint64_t* flag = &world.control[world.rank]->flags[work.source][turn.slot][work.chunk * kParts + lane_idx()];
    arrived = wait_word(world, turn, work.source, kWaitFlag, flag, turn.tag);
  }
  return __all_sync(kFullWarp, arrived);
}

// By a whole warp, after its rows are written and fenced.
__device__ inline void post_chunk(const World& world, const Turn& turn, const Work& work) {
  __syncwarp();
  if (lane_idx() < world.size && lane_idx() != world.rank) {
    __threadfence_system();
    post_flag(world, turn, lane_idx(), work.chunk * kParts + work.part);
  }
  __syncwarp();
}

__device__ inline void pad_rows(const MoveInput& in, const Span& span, int first_thread, int num_threads) {
  const int64_t begin = span.first * in.row_bytes, end = (span.first + span.count) * in.row_bytes;
  const uint32_t low = static_cast<uint32_t>(in.padding), high = static_cast<uint32_t>(in.padding >> 32);
  const uint4 value = make_uint4(low, high, low, high);
  for (int64_t at = begin + first_thread * 16; at < end; at += num_threads * 16) {
    store_16(in.out + at, value);
  }
}

// -- rows through registers: every GPU --------------------------------------------------------------------------------

// By a whole warp: copies a row to each place; `mine` is the row number that this lane knows, -1 for none.
__device__ inline void copy_row(const char* source, char* out, int64_t row_bytes, int mine, int mine_too) {
  constexpr int kBatch = 4;
  const unsigned int places = __ballot_sync(kFullWarp, mine >= 0);
  const unsigned int more_places = __ballot_sync(kFullWarp, mine_too >= 0);
  for (int64_t first = lane_idx() * 16; first - lane_idx() * 16 < row_bytes; first += kBatch * 512) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * 512 < row_bytes) {
        values[i] = load_16(source + first + i * 512);
      }
    }
    for (int half = 0; half < 2; ++half) {
      for (unsigned int left = half == 0 ? places : more_places; left != 0; left &= left - 1) {
        const int64_t row = __shfl_sync(kFullWarp, half == 0 ? mine : mine_too, __ffs(left) - 1);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * 512 < row_bytes) {
            store_16(out + row * row_bytes + first + i * 512, values[i]);
          }
        }
      }
    }
  }
}

// Where compact row i goes: the row number that this lane knows of, and one more where K > 32.
struct Places {
  int mine;
  int mine_too;
};

__device__ inline Places places_of(const MoveInput& in, int64_t compact) {
  const int lane = lane_idx();
  if (!in.expert_major) {
    return {lane == 0 && compact < in.num_rows ? static_cast<int>(compact) : -1, -1};
  }
  const int32_t* pairs = in.pair_row + compact * in.num_topk;
  return {lane < in.num_topk ? pairs[lane] : -1, lane + 32 < in.num_topk ? pairs[lane + 32] : -1};
}

__device__ inline const char* source_rows(const World& world, const MoveInput& in, const Turn& turn, int source,
                                          int64_t* stride) {
  *stride = source == world.rank ? in.x_stride_bytes : in.row_bytes;
  return source == world.rank ? in.x : slot_of(world, source, turn);
}

}  // namespace moe_ep
