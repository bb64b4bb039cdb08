#include "intranode/chunk.cuh"
#include "intranode/sums.cuh"

namespace moe_ep {
namespace {

__device__ int64_t read_id(const PlanInput& in, int64_t token, int slot) {
  const int64_t at = token * in.id_stride_token + slot * in.id_stride_slot;
  return in.id_bytes == 8 ? static_cast<const int64_t*>(in.ids)[at] : static_cast<const int32_t*>(in.ids)[at];
}

template <typename Number>
__device__ void publish_weights(const PlanInput& in, Number* out, int64_t first, int64_t end) {
  const Number* const weights = static_cast<const Number*>(in.weights);
  for (int64_t base = first + threadIdx.x; base < end; base += kTogether * blockDim.x) {
    Number values[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int64_t i = base + j * blockDim.x;
      if (i < end) {
        values[j] = weights[i / in.num_topk * in.weight_stride_token + i % in.num_topk * in.weight_stride_slot];
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int64_t i = base + j * blockDim.x;
      if (i < end) {
        out[i] = values[j];
      }
    }
  }
}

// By a whole block: part `part` of this rank's ids, as int32 with the bad ones turned to -1, and of its weights, to
// where its peers read them. There is a part a block.
__device__ void publish(const Call& call, const PlanInput& in, const Turn& turn, int64_t part) {
  char* slot = slot_of(call.world, call.world.rank, turn);
  const int64_t num_ids = in.num_tokens * in.num_topk;
  const int64_t first = num_ids * part / gridDim.x, end = num_ids * (part + 1) / gridDim.x;
  for (int64_t base = first + threadIdx.x; base < end; base += kTogether * blockDim.x) {
    int64_t ids[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int64_t i = base + j * blockDim.x;
      ids[j] = i < end ? read_id(in, i / in.num_topk, static_cast<int>(i % in.num_topk)) : -1;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int64_t i = base + j * blockDim.x;
      if (ids[j] < -1 || ids[j] >= in.num_experts) {
        atomicMin(reinterpret_cast<unsigned long long*>(&call.world.state->bad_slot),
                  static_cast<unsigned long long>(i));
        ids[j] = -1;
      }
      if (i < end) {
        reinterpret_cast<int32_t*>(slot)[i] = static_cast<int32_t>(ids[j]);
      }
    }
  }
  char* const weights = slot + weights_offset(in.num_tokens, in.num_topk);
  if (in.weights != nullptr && in.weight_bytes == 8) {
    publish_weights(in, reinterpret_cast<double*>(weights), first, end);
  } else if (in.weights != nullptr) {
    publish_weights(in, reinterpret_cast<float*>(weights), first, end);
  }
}

// By a whole block: one more of what `counter` counts. Who sees it there sees what the block wrote before.
__device__ void count_up(uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
  }
}

// The warps of a block that count a chunk together, each a part of its tokens.
struct Team {
  int number;  // of the chunk
  bool counts;
  int member;
  int size;
};

// By a whole block, a chunk a team. `counters` are the team's, `tile` the warp's.
__device__ void count_chunks(const World& world, const PlanInput& in, const Turn& turn, const Team& team, int32_t* tile,
                             int32_t* counters) {
  const int columns = in.num_local + world.size, lane = lane_idx();
  const int first_column = team.counts ? team.member * 32 + lane : columns, step = team.size * 32;
  for (int i = first_column; i < columns; i += step) {
    counters[i] = 0;
  }
  __syncthreads();
  Chunk chunk = {};
  if (team.counts) {
    chunk = chunk_of(world, in, turn, team.number);
    const int64_t length = chunk.end - chunk.first;
    count_tokens(world, in, chunk, chunk.first + length * team.member / team.size,
                 chunk.first + length * (team.member + 1) / team.size, tile, counters);
  }
  __syncthreads();
  int32_t* out = in.chunk_counts + static_cast<int64_t>(team.number) * columns;
  State::Sums& sums = world.state->sums;
  int pairs = 0;
  for (int i = first_column; i < columns; i += step) {
    const int count = counters[i];
    out[i] = count;
    if (count == 0) {
      continue;
    }
    if (i < in.num_local) {
      pairs += count;
      atomicAdd(&sums.experts[i], count);
    } else {
      atomicAdd(&sums.rank_rows[chunk.source * world.size + i - in.num_local], count);
    }
  }
  pairs = __reduce_add_sync(kFullWarp, pairs);
  if (lane == 0 && pairs > 0) {
    atomicAdd(&sums.pairs[chunk.source], pairs);
  }
}

// The status that this rank sends: that of the call, or ValueError where an id is bad and the host waits.
__device__ int64_t status_of(const Call& call, const PlanInput& in) {
  HostRecord* record = call.world.record;
  const uint64_t bad = *static_cast<volatile uint64_t*>(&call.world.state->bad_slot);
  if (call.header[kStatusWord] != kFine || bad == ~0ull) {
    return call.header[kStatusWord];
  }
  const int64_t id = read_id(in, static_cast<int64_t>(bad) / in.num_topk, static_cast<int>(bad % in.num_topk));
  if (in.max_rows < 0) {
    record->bad_slot = static_cast<int64_t>(bad);
    record->bad_id = id;
    return 1;  // ValueError
  }
  if (load_acquire(&record->bad_idx.valid) == 0) {
    record->bad_idx.values[0] = static_cast<int64_t>(bad);
    record->bad_idx.values[1] = id;
    record->bad_idx.values[2] = in.num_topk;
    record->bad_idx.values[3] = in.num_experts;
    store_release(&record->bad_idx.valid, 1);
  }
  return kFine;
}

__global__ void __launch_bounds__(kPlanThreads, 1)
    moe_ep_plan_count(const __grid_constant__ Call call, const __grid_constant__ PlanInput in) {
  extern __shared__ int32_t shared[];
  __shared__ uint32_t verdict;
  const World& world = call.world;
  State* state = world.state;
  const Turn turn = turn_of(world);
  const int columns = in.num_local + world.size;
  constexpr uint32_t kUnknown = ~0u;
  // Chunks for every block, if there are enough, and all its warps for them.
  const int num_chunks_all = world.size * kMaxChunks, blocks = gridDim.x;
  const int num_warps = blockDim.x / 32, at_a_time = min(num_warps, (num_chunks_all + blocks - 1) / blocks);
  const int team_size = num_warps / at_a_time, team = warp_idx() / team_size;
  const auto tile_of = [&](int warp) { return shared + warp * (kTile + columns); };
  int32_t* tile = tile_of(warp_idx());
  int32_t* counters = tile_of(team * team_size) + kTile;
  const uint32_t num_publish_tickets = gridDim.x, num_chunk_tickets = (num_chunks_all + at_a_time - 1) / at_a_time;
  const uint32_t sum_ticket = num_publish_tickets + 1 + num_chunk_tickets;
  const uint32_t num_scan_tickets = (columns + num_warps - 1) / num_warps;

  if (threadIdx.x < 32) {
    const bool ready = state->failed == 0 && slots_are_free(world, turn);
    if (threadIdx.x == 0) {
      verdict = ready ? kUnknown : kFailed;
    }
  }
  __syncthreads();
  while (verdict == kUnknown || verdict == kGo) {
    const uint32_t ticket = block_ticket(state);
    if (ticket < num_publish_tickets) {
      if (call.header[kStatusWord] == kFine) {
        publish(call, in, turn, ticket);
      }
      count_up(&state->num_published);
      continue;
    }
    if (ticket > sum_ticket + num_scan_tickets) {
      break;
    }
    if (ticket == num_publish_tickets) {
      if (threadIdx.x < 32) {
        bool ready = true;
        if (threadIdx.x == 0) {
          ready = wait_counter(world, turn, &state->num_published, num_publish_tickets);
          __threadfence_system();
        }
        if (__shfl_sync(kFullWarp, ready, 0)) {
          send_header(call, turn, status_of(call, in));
        }
      }
      continue;
    }
    if (verdict == kUnknown) {
      __syncthreads();
      if (threadIdx.x < 32) {
        const uint32_t answer = verdict_of(call, turn);
        if (threadIdx.x == 0) {
          verdict = answer;
        }
      }
      __syncthreads();
      if (verdict != kGo) {
        break;
      }
    }
    if (ticket < sum_ticket) {
      const int number = (ticket - num_publish_tickets - 1) * at_a_time + team;
      const bool counts = team < at_a_time && number < num_chunks_all;
      count_chunks(world, in, turn, {number, counts, warp_idx() % team_size, team_size}, tile, counters);
      count_up(&state->num_counted);
      continue;
    }
    __shared__ bool counted;
    if (threadIdx.x == 0) {
      counted = wait_counter(world, turn, &state->num_counted, num_chunk_tickets);
      __threadfence();
    }
    __syncthreads();
    if (!counted) {
      break;
    }
    if (ticket == sum_ticket) {
      sum_up(call, in, turn, shared);
    } else {
      scan_columns(world, in, ticket - sum_ticket - 1);
    }
  }

  if (!is_last_block(state)) {
    return;
  }
  // The last block may have left before it saw a header.
  if (threadIdx.x < 32 && verdict == kUnknown) {
    const uint32_t answer = verdict_of(call, turn);
    if (threadIdx.x == 0) {
      verdict = answer;
    }
  }
  __syncthreads();
  const uint32_t outcome = load_acquire_gpu(&state->failed) != 0 ? static_cast<uint32_t>(kFailed) : verdict;
  __syncthreads();
  if (threadIdx.x == 0) {
    state->bad_slot = ~0ull;
    state->verdict = outcome;
  }
  if (outcome == kGo) {
    if (threadIdx.x == 0) {
      rewind_tickets(state);
    }
    return;
  }
  // Calls that follow it without a host wait give NaN.
  const int length = Geometry::length(world.size, in.num_local);
  for (int i = threadIdx.x; i < length; i += blockDim.x) {
    in.geometry[i] = i == Geometry::kOverflowed || i == Geometry::kNoPlan;
  }
  for (int i = threadIdx.x; i <= in.num_local; i += blockDim.x) {
    in.expert_offsets[i] = 0;
    if (i < in.num_local) {
      in.expert_counts[i] = 0;
    }
  }
  if (in.max_rows < 0) {
    close_call(call, turn, outcome, nullptr, 0, false);
  } else if (threadIdx.x == 0) {
    rewind_tickets(state);
  }
}

}  // namespace

void launch_plan_count(const Call& call, const PlanInput& input, int num_sms, cudaStream_t stream) {
  MOE_EP_CHECK(input.num_local <= kMaxLocalExperts, "a rank holds ", input.num_local,
               " experts; the intranode backend ", "counts at most ", kMaxLocalExperts,
               ": use more ranks, or backend=\"torch\".");
  const PlanBlock block = plan_block(call, input, 1, most_shared_bytes());
  allow_shared_memory<moe_ep_plan_count>(block.num_bytes, "plan_count: the shared memory for the counters");
  moe_ep_plan_count<<<num_sms, block.num_warps * 32, block.num_bytes, stream>>>(call, input);
  check_cuda(cudaGetLastError(), "plan_count: the launch");
}

}  // namespace moe_ep
