// What the kernels that move rows along a plan share: the order of their tickets, and rows through registers.
#pragma once

#include "common/check.h"
#include "exchange/device.cuh"
#include "intranode/move.h"

// Tickets of a call, in steps: step i takes chunk i of the own tokens, to this rank's places and to staging, and pulls
// chunk i - lead of every peer, so that publishing runs ahead of the peers' pulls. The ticket that publishes a chunk is
// lower than those of this rank that wait for the same chunk of a peer, on every rank (8, 9).

namespace moe_ep {

constexpr int kTailTickets = 32;

// -- what a ticket means --------------------------------------------------------------------------------------------

struct MoveWork {
  enum Kind { kOwn, kPull, kPad, kTail, kNothing, kEnd } kind;
  int source;
  int chunk;
  int part;  // of a chunk; number of the expert or of the tail's part
};

__device__ inline MoveWork move_work(const World& world, const MoveInput& in, uint32_t ticket, int most) {
  const int size = world.size, lead = min(in.lead, most);
  const uint32_t per_step = kParts * size, step = ticket / per_step, place = ticket % per_step;
  if (step < static_cast<uint32_t>(most + lead)) {
    const int part = place % kParts;
    if (place < kParts) {
      return {static_cast<int>(step) < most ? MoveWork::kOwn : MoveWork::kNothing, world.rank, static_cast<int>(step),
              part};
    }
    const int source = (world.rank + static_cast<int>(place) / kParts) % size;
    const int chunk = static_cast<int>(step) - lead;
    return {chunk < 0 ? MoveWork::kNothing : MoveWork::kPull, source, chunk, part};
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
  return part_of(chunk_rows[0], chunk_rows[1], work.part);
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
  if (is_registered(world, turn, work.source)) {
    return true;
  }
  bool arrived = true;
  if (lane_idx() < kParts) {
    const uint64_t* flag = &world.control[world.rank]->flags[work.source][turn.slot][work.chunk * kParts + lane_idx()];
    arrived = wait_word(world, turn, work.source, kWaitFlag, flag, turn.tag);
  }
  __syncwarp();  // what one lane has seen, all see
  return __all_sync(kFullWarp, arrived);
}

// By a whole warp that has seen the rows of the part written: tells the peers. The release orders them for all.
__device__ inline void post_chunk(const World& world, const Turn& turn, const MoveWork& work) {
  __syncwarp();
  if (lane_idx() < world.size && lane_idx() != world.rank) {
    post_flag(world, turn, lane_idx(), work.chunk * kParts + work.part);
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

// Where compact row i goes: the row number that this lane knows of, -1 for none, and one more where K > 32.
struct Places {
  int mine;
  int mine_too;
};

// By a whole warp.
__device__ inline Places places_of(const MoveInput& in, int64_t compact) {
  const int lane = lane_idx();
  if (compact < 0) {
    return {-1, -1};
  }
  if (!in.expert_major) {
    return {lane == 0 && compact < in.num_rows ? static_cast<int>(compact) : -1, -1};
  }
  const int32_t* pairs = in.pair_row + compact * in.num_topk;
  return {lane < in.num_topk ? pairs[lane] : -1, lane + 32 < in.num_topk ? pairs[lane + 32] : -1};
}

// By a whole warp: copies a row to each place, and to `staging` where that is given.
__device__ inline void copy_row(const char* source, char* out, int64_t row_bytes, const Places& to,
                                char* staging = nullptr) {
  constexpr int kBatch = 4;
  const unsigned int places = __ballot_sync(kFullWarp, to.mine >= 0);
  const unsigned int more_places = __ballot_sync(kFullWarp, to.mine_too >= 0);
  for (int64_t first = lane_idx() * 16; first - lane_idx() * 16 < row_bytes; first += kBatch * 512) {
    uint4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * 512 < row_bytes) {
        values[i] = load_16(source + first + i * 512);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch && staging != nullptr; ++i) {
      if (first + i * 512 < row_bytes) {
        store_16(staging + first + i * 512, values[i]);
      }
    }
    for (int half = 0; half < 2; ++half) {
      for (unsigned int left = half == 0 ? places : more_places; left != 0; left &= left - 1) {
        const int64_t row = __shfl_sync(kFullWarp, half == 0 ? to.mine : to.mine_too, __ffs(left) - 1);
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

// Where the rows of a kind begin, and how far they are apart.
struct Place {
  const char* rows;
  int64_t stride_bytes;
};

__device__ inline Place staging_place(const World& world, const MoveInput& in, const Turn& turn, int rank, int kind) {
  const int64_t num_tokens = in.geometry[Geometry::kTokens + rank];
  return {slot_of(world, rank, turn) + (kind == 0 ? 0 : num_tokens * in.rows[0].row_bytes), in.rows[kind].row_bytes};
}

// What `source`, a peer, sends: its caller's rows, or its staging.
__device__ inline Place source_place(const World& world, const MoveInput& in, const Turn& turn, int source, int kind) {
  const int64_t* words = world.control[world.rank]->headers[source][turn.slot].words + kRegisteredWord;
  if (words[0] != 0 && in.rows[kind].row_bytes > 0) {
    return {world.blocks[(words[0] >> 8 * kind & 0xFF) - 1][source] + words[1 + 2 * kind], words[2 + 2 * kind]};
  }
  return staging_place(world, in, turn, source, kind);
}

// Where an own token goes.
struct OwnToken {
  int compact_row;  // on this rank, -1 for none
  bool is_wanted;   // by a peer
};

__device__ inline OwnToken own_token(const World& world, const MoveInput& in, int64_t token) {
  OwnToken own = {-1, false};
  for (int rank = 0; rank < world.size; ++rank) {
    const int row = in.token_row[token * world.size + rank];
    own.is_wanted |= rank != world.rank && row >= 0;
    own.compact_row = rank == world.rank ? row : own.compact_row;
  }
  return own;
}

// By every block of a dispatch, last thing.
__device__ inline void end_move(const Call& call, const MoveInput& in, const Turn& turn, uint32_t verdict) {
  if (!is_last_block(call.world.state)) {
    return;
  }
  Output outputs[kRowKinds];
  for (int kind = 0; kind < kRowKinds; ++kind) {
    outputs[kind] = {in.rows[kind].out, in.num_rows * in.rows[kind].row_bytes, in.rows[kind].poison};
    if (verdict == kGo && in.geometry[Geometry::kOverflowed] != 0) {
      fill_output(outputs[kind]);
    }
  }
  close_call(call, turn, verdict, outputs, kRowKinds, in.is_registered);
}

}  // namespace moe_ep
