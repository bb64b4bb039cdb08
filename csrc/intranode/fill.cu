#include "intranode/chunk.cuh"

namespace moe_ep {
namespace {

template <typename Id>
__device__ void put_id(void* ids, int64_t at, int value) {
  static_cast<Id*>(ids)[at] = value;
}

__device__ void put_row(const PlanInput& in, const PlanOutput& out, int64_t at, int idx, double weight) {
  if (in.id_bytes == 8) {
    put_id<int64_t>(out.row_idx, at, idx);
  } else {
    put_id<int32_t>(out.row_idx, at, idx);
  }
  if (out.row_weights != nullptr) {
    if (in.weight_bytes == 8) {
      static_cast<double*>(out.row_weights)[at] = weight;
    } else {
      static_cast<float*>(out.row_weights)[at] = static_cast<float>(weight);
    }
  }
}

// The weights of a tile's pairs.
struct TileWeights {
  int num_bytes;          // of a weight, 0 where there are none
  const double* doubles;  // at the source
  const int32_t* floats;  // in shared memory, as bits

  __device__ double at(int pair) const {
    if (num_bytes == 8) {
      double weight;
      asm volatile("ld.global.L1::no_allocate.f64 %0, [%1];" : "=d"(weight) : "l"(doubles + pair));
      return weight;
    }
    return num_bytes == 0 ? 0.0 : __int_as_float(floats[pair]);
  }
};

// By a whole warp. `tile` is for those of float32: a pair after the other they would be the longest part of a chunk.
__device__ TileWeights tile_weights(const Chunk& chunk, const PlanInput& in, int64_t num_tokens, int64_t first_pair,
                                    int num_pairs, int32_t* tile) {
  const char* weights = reinterpret_cast<const char*>(chunk.ids) + weights_offset(num_tokens, in.num_topk);
  if (in.weight_bytes == 4) {  // not the pointer: it is null too where this rank has no tokens
    load_words(reinterpret_cast<const int32_t*>(weights) + first_pair, num_pairs, tile);
  }
  return {in.weight_bytes, reinterpret_cast<const double*>(weights) + first_pair, tile};
}

// Laying out a chunk takes one warp far longer than its counts would, so it is cut into parts, as many as keep the
// warps busy. A part counts again what comes before it in the chunk.
constexpr int kMostParts = 4;

__device__ inline int parts_of_chunk(int num_chunks) {
  const int num_warps = gridDim.x * (blockDim.x / 32);
  return max(1, min(kMostParts, num_warps / num_chunks));
}

// By a whole warp: part `part` of `num_parts` of a chunk.
__device__ void fill_chunk(const World& world, const PlanInput& in, const PlanOutput& out, const Turn& turn, int number,
                           int part, int num_parts, int32_t* tile, int32_t* rows, int32_t* weight_tile,
                           int32_t* counters) {
  const Chunk chunk = chunk_of(world, in, turn, number);
  const int64_t length = chunk.end - chunk.first;
  const int64_t begin = chunk.first + length * part / num_parts, end = chunk.first + length * (part + 1) / num_parts;
  const int size = world.size, columns = in.num_local + size, lane = lane_idx(), num_topk = in.num_topk;
  const int32_t* geometry = in.geometry;
  const int32_t* rank_rows = geometry + Geometry::rank_rows(size);
  const int64_t source_tokens = geometry[Geometry::kTokens + chunk.source];
  const int32_t* sums = in.chunk_counts + static_cast<int64_t>(number) * columns;
  const unsigned int lanes_before = (1u << lane) - 1;
  const bool own = chunk.source == world.rank;
  const int32_t* offsets = geometry + Geometry::expert_offsets(size);
  for (int base = lane; base < in.num_local; base += kTogether * 32) {
    int start[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = base + 32 * j;
      start[j] = i < in.num_local ? sums[i] + offsets[i] : 0;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (base + 32 * j < in.num_local) {
        counters[base + 32 * j] = start[j];
      }
    }
  }
  if (lane < size) {  // where the rows of this source begin on that rank
    int start = sums[in.num_local + lane];
    for (int before = 0; before < chunk.source; ++before) {
      start += rank_rows[before * size + lane];
    }
    counters[in.num_local + lane] = start;
  }
  __syncwarp();
  count_tokens(world, in, chunk, chunk.first, begin, tile, counters);
  const int tile_tokens = kTile / num_topk;
  for (int64_t first = begin; first < end; first += tile_tokens) {
    const int num_tokens = static_cast<int>(min64(tile_tokens, end - first));
    const int num_ids = load_tile(chunk, num_topk, first, num_tokens, tile);
    const TileWeights weights = tile_weights(chunk, in, source_tokens, first * num_topk, num_ids, weight_tile);
    for (int base = 0; base < num_tokens; base += 32) {
      const int token = base + lane;
      const uint32_t ranks = ranks_of_token(in, tile, token, num_tokens);
      int64_t send_base = 0;
      for (int rank = 0; rank < size; ++rank) {
        const bool goes = ranks >> rank & 1;
        const unsigned int goers = __ballot_sync(kFullWarp, goes);
        const int row = goes ? counters[in.num_local + rank] + __popc(goers & lanes_before) : -1;
        __syncwarp();
        if (lane == 0) {
          counters[in.num_local + rank] += __popc(goers);
        }
        __syncwarp();
        if (rank == world.rank && token < num_tokens) {
          rows[token] = row;
          if (row >= 0 && row < out.capacity) {
            out.recv_token[row] = static_cast<int32_t>(first + token);
          }
        }
        if (own && token < num_tokens) {
          out.token_row[(first + token) * size + rank] = row;
          if (goes && out.send_token != nullptr) {
            int64_t start = 0;  // of this source's rows on `rank`
            for (int before = 0; before < chunk.source; ++before) {
              start += rank_rows[before * size + rank];
            }
            out.send_token[send_base + row - start] = first + token;
          }
        }
        send_base += rank_rows[chunk.source * size + rank];
      }
    }
    __syncwarp();
    const auto id_at = [&](int i) { return i < num_ids ? tile[i] : -1; };
    int next_token = lane / num_topk, next_slot = lane % num_topk;
    const int tokens_a_step = 32 / num_topk, slots_a_step = 32 % num_topk;
    int32_t next_id = id_at(lane);
    int next_local = local_expert(world, in, next_id);
    for (int base = 0; base < num_ids; base += 32) {
      const int i = base + lane, token = next_token, slot = next_slot, local = next_local;
      const int32_t id = next_id;
      const bool wraps = slot + slots_a_step >= num_topk;
      next_token += tokens_a_step + wraps;
      next_slot += slots_a_step - (wraps ? num_topk : 0);
      next_id = id_at(i + 32);
      next_local = local_expert(world, in, next_id);  // on its way while these are laid out
      const unsigned int same = __match_any_sync(kFullWarp, local);
      const int row = local >= 0 ? counters[local] + __popc(same & lanes_before) : -1;
      __syncwarp();
      if (local >= 0 && (same & lanes_before) == 0) {
        counters[local] += __popc(same);
      }
      __syncwarp();
      if (i >= num_ids) {
        continue;
      }
      if (own) {
        out.slot_rank[first * num_topk + i] = id >= 0 ? in.owner[id] : -1;
      }
      const int64_t compact = rows[token];
      if (compact < 0) {
        continue;
      }
      // Of an overflow some tokens have no compact row, but their rows among those of the experts are to be described.
      const bool fits = compact < out.capacity;
      const int64_t pair = compact * num_topk + slot;
      const double weight = local >= 0 ? weights.at(i) : 0.0;
      if (in.expert_major) {
        if (fits) {
          out.pair_row[pair] = row < out.num_rows ? row : -1;
        }
        if (row >= 0 && row < out.num_rows) {
          out.row_pair[row] = fits ? pair : -1;
          put_row(in, out, row, local, weight);
        }
      } else if (fits) {
        put_row(in, out, pair, local, weight);
      }
    }
    __syncwarp();
  }
}

// By a whole warp: the rows behind those of an expert, or behind all.
__device__ void fill_padding(const PlanInput& in, const PlanOutput& out, int64_t first, int64_t end) {
  const int64_t width = in.expert_major ? 1 : in.num_topk;
  for (int64_t i = first * width + lane_idx(); i < min64(end, out.num_rows) * width; i += 32) {
    put_row(in, out, i, -1, 0);
    if (in.expert_major) {
      out.row_pair[i] = -1;
    }
  }
}

constexpr int kTailTickets = 16;

__global__ void __launch_bounds__(kPlanThreads, 1)
    moe_ep_plan_fill(const __grid_constant__ Call call, const __grid_constant__ PlanInput in,
                     const __grid_constant__ PlanOutput out) {
  extern __shared__ int32_t shared[];
  const World& world = call.world;
  State* state = world.state;
  const Turn turn = turn_of(world);
  const int columns = in.num_local + world.size;
  int32_t* tile = shared + warp_idx() * (3 * kTile + columns);
  int32_t* rows = tile + kTile;
  int32_t* weight_tile = rows + kTile;
  int32_t* counters = weight_tile + kTile;
  const uint32_t verdict = state->verdict;
  const int32_t* geometry = in.geometry;
  const int num_parts = parts_of_chunk(world.size * kMaxChunks);
  const uint32_t num_chunk_tickets = world.size * kMaxChunks * num_parts;
  const bool is_enough = !out.only_if_enough || (verdict == kGo && geometry[Geometry::kCompactRows] <= out.capacity &&
                                                 geometry[Geometry::kRows] <= out.num_rows);
  while (verdict == kGo && is_enough) {
    const uint32_t ticket = warp_ticket(state);
    if (ticket < num_chunk_tickets) {
      fill_chunk(world, in, out, turn, ticket / num_parts, ticket % num_parts, num_parts, tile, rows, weight_tile,
                 counters);
      continue;
    }
    const int64_t item = ticket - num_chunk_tickets;
    if (item < in.num_local && in.expert_major) {
      const int32_t* offsets = geometry + Geometry::expert_offsets(world.size);
      const int32_t* counts = geometry + Geometry::expert_counts(world.size, in.num_local);
      fill_padding(in, out, offsets[item] + counts[item], offsets[item + 1]);
    } else if (item >= in.num_local && item < in.num_local + kTailTickets) {
      const int64_t part = item - in.num_local, begin = geometry[Geometry::kRows];
      const int64_t length = out.num_rows > begin && !out.only_if_enough ? out.num_rows - begin : 0;
      fill_padding(in, out, begin + length * part / kTailTickets, begin + length * (part + 1) / kTailTickets);
    } else if (item >= in.num_local + kTailTickets) {
      break;
    }
  }
  if (!is_last_block(state)) {
    return;
  }
  if (!is_enough && verdict != kFailed) {
    if (threadIdx.x == 0) {
      rewind_tickets(state);
    }
    return;
  }
  const int64_t width = in.expert_major ? 1 : in.num_topk;
  const Output weights = {out.row_weights, out.num_rows * width * in.weight_bytes,
                          in.weight_bytes == 8 ? 0x7FF8000000000000ull : 0x7FC000007FC00000ull};
  if (verdict == kGo && geometry[Geometry::kOverflowed] != 0) {
    fill_output(weights);
  }
  const Output outputs[] = {
      weights,
      {out.row_idx, out.num_rows * width * in.id_bytes, ~0ull},
      {out.row_pair, in.expert_major ? out.num_rows * 8 : 0, ~0ull},
      {out.token_row, in.num_tokens * world.size * 4, ~0ull},
      {out.slot_rank, in.num_tokens * in.num_topk * 8, ~0ull},
  };
  close_call(call, turn, verdict, outputs, 5, false);
}

}  // namespace

void launch_plan_fill(const Call& call, const PlanInput& input, const PlanOutput& output, int num_sms,
                      cudaStream_t stream) {
  const PlanBlock block = plan_block(call, input, 3, most_shared_bytes());
  allow_shared_memory<moe_ep_plan_fill>(block.num_bytes, "plan_fill: the shared memory for the counters");
  moe_ep_plan_fill<<<num_sms, block.num_warps * 32, block.num_bytes, stream>>>(call, input, output);
  check_cuda(cudaGetLastError(), "plan_fill: the launch");
}

}  // namespace moe_ep
