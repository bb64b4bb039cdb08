// How the kernels of a plan look at the ids that the ranks published: by chunks of a source.
#pragma once

#include "common/check.h"
#include "common/shared_memory.h"
#include "exchange/device.cuh"
#include "intranode/plan.h"

namespace moe_ep {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kTile = 512;    // ids that a warp looks at together
constexpr int kTogether = 4;  // loads of a thread on their way at once

// Where the weights lie behind the ids in a rank's slot.
__device__ inline int64_t weights_offset(int64_t num_tokens, int num_topk) {
  return (num_tokens * num_topk * 4 + 255) / 256 * 256;
}

// Consecutive tokens of a source.
struct Chunk {
  int source;
  int chunk;
  int64_t first;  // token
  int64_t end;
  const int32_t* ids;  // of the source
};

__device__ inline Chunk chunk_of(const World& world, const PlanInput& in, const Turn& turn, int number) {
  Chunk chunk;
  chunk.source = number / kMaxChunks;
  chunk.chunk = number % kMaxChunks;
  const int64_t num_tokens = world.control[world.rank]->headers[chunk.source][turn.slot].words[kTokensWord];
  const int64_t size = chunk_tokens(num_tokens);
  chunk.first = min64(chunk.chunk * size, num_tokens);
  chunk.end = min64(chunk.first + size, num_tokens);
  chunk.ids = reinterpret_cast<const int32_t*>(slot_of(world, chunk.source, turn));
  return chunk;
}

// By a whole warp: `count` words of a source, at most kTile. All are on their way at once, since the way is long.
__device__ inline void load_words(const int32_t* from, int count, int32_t* tile) {
  constexpr int kWords = kTile / 32;
  const int lane = lane_idx();
  int32_t words[kWords];
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    if (lane + 32 * j < count) {
      asm volatile("ld.global.L1::no_allocate.s32 %0, [%1];" : "=r"(words[j]) : "l"(from + lane + 32 * j));
    }
  }
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    if (lane + 32 * j < count) {
      tile[lane + 32 * j] = words[j];
    }
  }
  __syncwarp();
}

__device__ inline int load_tile(const Chunk& chunk, int num_topk, int64_t first, int64_t tokens, int32_t* tile) {
  const int num_ids = static_cast<int>(tokens * num_topk);
  load_words(chunk.ids + first * num_topk, num_ids, tile);
  return num_ids;
}

// By a whole warp: the ranks that token `lane` of the tile goes to, as bits; 0 past the end.
__device__ inline uint32_t ranks_of_token(const PlanInput& in, const int32_t* tile, int token, int num_tokens) {
  uint32_t ranks = 0;
  if (token < num_tokens) {
#pragma unroll kTogether
    for (int k = 0; k < in.num_topk; ++k) {
      const int32_t id = tile[token * in.num_topk + k];
      ranks |= id >= 0 ? 1u << in.owner[id] : 0u;
    }
  }
  return ranks;
}

__device__ inline int local_expert(const World& world, const PlanInput& in, int32_t id) {
  if (id < 0) {
    return -1;
  }
  const int owner = in.owner[id], local = in.local_idx[id];  // both on their way at once
  return owner == world.rank ? local : -1;
}

// By a whole warp: adds the tile's pairs of each local expert, and its tokens that go to each rank, to `counters`,
// which other warps may add to as well. Integers: the order cannot show.
__device__ inline void count_tile(const World& world, const PlanInput& in, const int32_t* tile, int num_tokens,
                                  int num_ids, int32_t* counters) {
  const int lane = lane_idx();
  for (int token = 0; token < num_tokens; token += 32) {
    const uint32_t ranks = ranks_of_token(in, tile, token + lane, num_tokens);
    for (int rank = 0; rank < world.size; ++rank) {
      const int count = __popc(__ballot_sync(kFullWarp, ranks >> rank & 1));
      if (lane == 0) {
        atomicAdd(&counters[in.num_local + rank], count);
      }
    }
  }
  for (int base = lane; base < num_ids; base += kTogether * 32) {
    int local[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      local[j] = base + 32 * j < num_ids ? local_expert(world, in, tile[base + 32 * j]) : -1;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (local[j] >= 0) {
        atomicAdd(&counters[local[j]], 1);
      }
    }
  }
  __syncwarp();
}

// By a whole warp: the same for the tokens [first, end) of a source.
__device__ inline void count_tokens(const World& world, const PlanInput& in, const Chunk& chunk, int64_t first,
                                    int64_t end, int32_t* tile, int32_t* counters) {
  const int tile_tokens = kTile / in.num_topk;
  for (; first < end; first += tile_tokens) {
    const int num_tokens = static_cast<int>(min64(tile_tokens, end - first));
    const int num_ids = load_tile(chunk, in.num_topk, first, num_tokens, tile);
    count_tile(world, in, tile, num_tokens, num_ids, counters);
  }
}

// How a kernel of a plan is launched.
struct PlanBlock {
  int num_warps;
  int num_bytes;  // of dynamic shared memory
};

// As many warps as have room for `num_tiles` tiles and a counter for each column; no result depends on it. All of them
// fit on sm_90; 99 KB, the least of sm_80 and later, hold 6 where W and L are as large as can be.
inline PlanBlock plan_block(const Call& call, const PlanInput& input, int num_tiles, int most_bytes) {
  constexpr int kStaticBytes = 2048;
  const int of_warp = (num_tiles * kTile + input.num_local + call.world.size) * static_cast<int>(sizeof(int32_t));
  const int fit = (most_bytes - kStaticBytes) / of_warp;
  const int num_warps = fit < kPlanWarps ? fit : kPlanWarps;
  return {num_warps, num_warps * of_warp};
}

}  // namespace moe_ep
