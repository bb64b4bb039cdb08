// What the kernels that move rows along a plan share: the order of their tickets, and rows through registers.
#pragma once

#include "check.h"
#include "exchange_device.cuh"
#include "intranode_move.h"

// Tickets of a call, in steps: step i publishes chunk i of the own tokens and pulls chunk i - kMoveLead of every
// source, so that publishing runs ahead of the peers' pulls. The number of tickets in a step and the number of steps
// are the same on all ranks, so the ticket that publishes a chunk is lower than those that wait for it, everywhere (8,
// 9).

namespace moe_ep {

constexpr int kMoveLead = 6;
constexpr int kTailTickets = 32;

// -- what a ticket means --------------------------------------------------------------------------------------------

struct MoveWork {
  enum Kind { kPublish, kPull, kPad, kTail, kNothing, kEnd } kind;
  int source;
  int chunk;
  int part;  // of a chunk; number of the expert or of the tail's part
};

__device__ inline MoveWork move_work(const World& world, const MoveInput& in, uint32_t ticket, int most) {
  const int size = world.size, lead = size == 1 ? 0 : kMoveLead;
  const uint32_t publishes = size == 1 ? 0 : kMoveParts, per_step = publishes + kMoveParts * size;
  const uint32_t step = ticket / per_step, place = ticket % per_step;
  if (step < static_cast<uint32_t>(most + lead)) {
    if (place < publishes) {
      return {static_cast<int>(step) < most ? MoveWork::kPublish : MoveWork::kNothing, world.rank,
              static_cast<int>(step), static_cast<int>(place)};
    }
    const int pull = place - publishes, chunk = static_cast<int>(step) - lead;
    const int source = (world.rank + 1 + pull / kMoveParts) % size;  // the own rows last
    return {chunk < 0 ? MoveWork::kNothing : MoveWork::kPull, source, chunk, pull % kMoveParts};
  }
  const int rest = ticket - per_step * (most + lead);
  if (in.expert_major && rest < in.num_local) {
    return {MoveWork::kPad, 0, 0, rest};
  }
  const int tail = rest - (in.expert_major ? in.num_local : 0);
  return {tail < kTailTickets ? MoveWork::kTail : MoveWork::kEnd, 0, 0, tail};
}

// The compact rows of a pull.
__device__ inline Span rows_of(const World& world, const MoveInput& in, const MoveWork& work) {
  const int32_t* chunk_rows =
      in.geometry + Geometry::chunk_rows(world.size) + work.source * (kMaxChunks + 1) + work.chunk;
  return part_of<kMoveParts>(chunk_rows[0], chunk_rows[1], work.part);
}

// The rows of a pad or tail ticket.
__device__ inline Span padding_of(const World& world, const MoveInput& in, const MoveWork& work) {
  if (work.kind == MoveWork::kPad) {
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
__device__ inline bool chunk_arrived(const World& world, const Turn& turn, const MoveWork& work) {
  if (work.source == world.rank || is_registered(world, turn, work.source)) {
    return true;
  }
  bool arrived = true;
  if (lane_idx() < kMoveParts) {
    const uint64_t* flag =
        &world.control[world.rank]->flags[work.source][turn.slot][work.chunk * kMoveParts + lane_idx()];
    arrived = wait_word(world, turn, work.source, kWaitFlag, flag, turn.tag);
  }
  return __all_sync(kFullWarp, arrived);
}

// By a whole warp, after its rows are written and fenced.
__device__ inline void post_chunk(const World& world, const Turn& turn, const MoveWork& work) {
  __syncwarp();
  if (lane_idx() < world.size && lane_idx() != world.rank) {
    __threadfence_system();
    post_flag(world, turn, lane_idx(), work.chunk * kMoveParts + work.part);
  }
  __syncwarp();
}

__device__ inline void pad_rows(const MoveInput& in, const Span& span, int first_thread, int num_threads) {
  for (const Rows& rows : in.rows) {
    const int64_t begin = span.first * rows.row_bytes, end = (span.first + span.count) * rows.row_bytes;
    const uint32_t low = static_cast<uint32_t>(rows.padding), high = static_cast<uint32_t>(rows.padding >> 32);
    const uint4 value = make_uint4(low, high, low, high);
    for (int64_t at = begin + first_thread * 16; at < end; at += num_threads * 16) {
      store_16(rows.out + at, value);
    }
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

// Where the rows of a kind begin, and how far they are apart.
struct Place {
  const char* rows;
  int64_t stride_bytes;
};

__device__ inline Place staging_place(const World& world, const MoveInput& in, const Turn& turn, int rank, int kind) {
  const int64_t num_tokens = in.geometry[Geometry::kTokens + rank];
  return {slot_of(world, rank, turn) + (kind == 0 ? 0 : num_tokens * in.rows[0].row_bytes), in.rows[kind].row_bytes};
}

// What `source` sends: the caller's own rows, a peer's caller's rows, or a peer's staging.
__device__ inline Place source_place(const World& world, const MoveInput& in, const Turn& turn, int source, int kind) {
  if (source == world.rank) {
    return {in.rows[kind].x, in.rows[kind].stride_bytes};
  }
  const int64_t* words = world.control[world.rank]->headers[source][turn.slot].words + kRegisteredWord;
  if (words[0] != 0) {
    return {world.blocks[words[0] - 1][source] + words[1 + 2 * kind], words[2 + 2 * kind]};
  }
  return staging_place(world, in, turn, source, kind);
}

__device__ inline void fill_outputs(const MoveInput& in) {
  for (const Rows& rows : in.rows) {
    fill_output({rows.out, in.num_rows * rows.row_bytes, rows.poison});
  }
}

}  // namespace moe_ep
