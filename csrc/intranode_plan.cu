#include "intranode_chunk.cuh"

namespace moe_ep {
namespace {

constexpr int kPublishTickets = 64;

__device__ int64_t read_id(const PlanInput& in, int64_t token, int slot) {
  const int64_t at = token * in.id_stride_token + slot * in.id_stride_slot;
  return in.id_bytes == 8 ? static_cast<const int64_t*>(in.ids)[at] : static_cast<const int32_t*>(in.ids)[at];
}

// This rank's ids, as int32 with the bad ones turned to -1, and its weights: where its peers read them.
__device__ void publish(const Call& call, const PlanInput& in, const Turn& turn, int part) {
  char* slot = slot_of(call.world, call.world.rank, turn);
  const int64_t num_ids = in.num_tokens * in.num_topk;
  const int64_t first = num_ids * part / kPublishTickets, end = num_ids * (part + 1) / kPublishTickets;
  for (int64_t i = first + threadIdx.x; i < end; i += kPlanThreads) {
    const int64_t token = i / in.num_topk;
    const int k = static_cast<int>(i % in.num_topk);
    int64_t id = read_id(in, token, k);
    if (id < -1 || id >= in.num_experts) {
      atomicMin(reinterpret_cast<unsigned long long*>(&call.world.state->bad_slot), static_cast<unsigned long long>(i));
      id = -1;
    }
    reinterpret_cast<int32_t*>(slot)[i] = static_cast<int32_t>(id);
    if (in.weights != nullptr) {
      const int64_t at = token * in.weight_stride_token + k * in.weight_stride_slot;
      char* weights = slot + weights_offset(in.num_tokens, in.num_topk);
      if (in.weight_bytes == 8) {
        reinterpret_cast<double*>(weights)[i] = static_cast<const double*>(in.weights)[at];
      } else {
        reinterpret_cast<float*>(weights)[i] = static_cast<const float*>(in.weights)[at];
      }
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    atomicAdd(&call.world.state->num_published, 1u);
  }
}

__device__ void count_chunk(const World& world, const PlanInput& in, const Turn& turn, int number, int32_t* tile,
                            int32_t* counters) {
  const Chunk chunk = chunk_of(world, in, turn, number);
  const int columns = in.num_local + world.size, lane = lane_idx();
  for (int i = lane; i < columns; i += 32) {
    counters[i] = 0;
  }
  __syncwarp();
  const int tile_tokens = kTile / in.num_topk;
  for (int64_t first = chunk.first; first < chunk.end; first += tile_tokens) {
    const int num_tokens = static_cast<int>(min64(tile_tokens, chunk.end - first));
    const int num_ids = load_tile(chunk, in.num_topk, first, num_tokens, tile);
    for (int token = 0; token < num_tokens; token += 32) {
      const uint32_t ranks = ranks_of_token(in, tile, token + lane, num_tokens);
      for (int rank = 0; rank < world.size; ++rank) {
        const int count = __popc(__ballot_sync(kFullWarp, ranks >> rank & 1));
        if (lane == 0) {
          counters[in.num_local + rank] += count;
        }
      }
    }
    for (int i = lane; i < num_ids; i += 32) {
      const int local = local_expert(world, in, tile[i]);
      if (local >= 0) {
        atomicAdd(&counters[local], 1);  // integers: the order cannot show
      }
    }
    __syncwarp();
  }
  int32_t* out = in.chunk_counts + static_cast<int64_t>(number) * columns;
  for (int i = lane; i < columns; i += 32) {
    out[i] = counters[i];
  }
  __syncwarp();
}

__device__ int exclusive_scan(int value, int* total) {
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, sum, step);
    sum += lane_idx() >= step ? before : 0;
  }
  *total = __shfl_sync(kFullWarp, sum, 31);
  return sum - value;
}

// By a whole warp: turns one column of chunk counts into exclusive sums, over all chunks (`carries`) or within each
// source, and gives the total of each source to lane `source`.
__device__ int scan_column(const World& world, int32_t* column, int stride, bool carries) {
  const int lane = lane_idx();
  int values[kMaxRanks][2];
#pragma unroll
  for (int source = 0; source < kMaxRanks; ++source) {
    if (source < world.size) {
      values[source][0] = column[(source * kMaxChunks + 2 * lane) * static_cast<int64_t>(stride)];
      values[source][1] = column[(source * kMaxChunks + 2 * lane + 1) * static_cast<int64_t>(stride)];
    }
  }
  int carry = 0, mine = 0;
#pragma unroll
  for (int source = 0; source < kMaxRanks; ++source) {
    if (source < world.size) {
      int total;
      const int before = exclusive_scan(values[source][0] + values[source][1], &total) + (carries ? carry : 0);
      column[(source * kMaxChunks + 2 * lane) * static_cast<int64_t>(stride)] = before;
      column[(source * kMaxChunks + 2 * lane + 1) * static_cast<int64_t>(stride)] = before + values[source][0];
      carry += total;
      mine = lane == source ? total : mine;
    }
  }
  return mine;
}

struct Totals {
  int rank_rows[kMaxRanks][kMaxRanks];
  int recv_pairs[kMaxRanks];
  int num_rows;
  int num_compact_rows;
};

// The caller's rows end at max_rows, also where more came: no GEMM may be sent behind them.
__device__ int32_t offset_for_caller(const PlanInput& in, int64_t offset) {
  const bool is_cut = in.expert_major && in.max_rows >= 0 && offset > in.max_rows;
  return static_cast<int32_t>(is_cut ? in.max_rows : offset);
}

// By the last working block: sums over chunks, the geometry, and what the host waits for.
__device__ void sum_up(const Call& call, const PlanInput& in, const Turn& turn, int32_t* expert_counts) {
  __shared__ Totals totals;
  const World& world = call.world;
  const int size = world.size, columns = in.num_local + size, lane = lane_idx();
  if (threadIdx.x < kMaxRanks) {
    totals.recv_pairs[threadIdx.x] = 0;
  }
  __syncthreads();
  for (int i = warp_idx(); i < columns; i += kPlanWarps) {
    const bool is_expert = i < in.num_local;
    const int total = scan_column(world, in.chunk_counts + i, columns, is_expert);
    if (is_expert) {
      if (lane < size) {
        atomicAdd(&totals.recv_pairs[lane], total);
      }
      const int sum = __reduce_add_sync(kFullWarp, lane < size ? total : 0);
      if (lane == 0) {
        expert_counts[i] = sum;
      }
    } else if (lane < size) {
      totals.rank_rows[lane][i - in.num_local] = total;
    }
  }
  __syncthreads();
  int32_t* geometry = in.geometry;
  if (warp_idx() == 0) {
    int32_t* offsets = geometry + Geometry::expert_offsets(size);
    int32_t* counts = geometry + Geometry::expert_counts(size, in.num_local);
    int64_t carry = 0;
    for (int first = 0; first < in.num_local; first += 32) {
      const int expert = first + lane;
      const int count = expert < in.num_local ? expert_counts[expert] : 0;
      int total;
      const int padded = static_cast<int>((count + in.alignment - 1) / in.alignment * in.alignment);
      const int before = exclusive_scan(padded, &total);
      if (expert < in.num_local) {
        offsets[expert] = static_cast<int32_t>(carry + before);
        in.expert_offsets[expert] = offset_for_caller(in, carry + before);
        counts[expert] = in.expert_counts[expert] = count;
      }
      carry += total;
    }
    if (lane == 0) {
      offsets[in.num_local] = static_cast<int32_t>(carry);
      in.expert_offsets[in.num_local] = offset_for_caller(in, carry);
      int compact = 0;
      for (int source = 0; source < size; ++source) {
        compact += totals.rank_rows[source][world.rank];
      }
      totals.num_compact_rows = compact;
      totals.num_rows = in.expert_major ? static_cast<int>(carry) : compact;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size * size; i += kPlanThreads) {
    geometry[Geometry::rank_rows(size) + i] = totals.rank_rows[i / size][i % size];
  }
  for (int i = threadIdx.x; i < size * (kMaxChunks + 1); i += kPlanThreads) {
    const int source = i / (kMaxChunks + 1), chunk = i % (kMaxChunks + 1);
    int row = 0;
    for (int before = 0; before < source; ++before) {
      row += totals.rank_rows[before][world.rank];
    }
    row += chunk == kMaxChunks ? totals.rank_rows[source][world.rank]
                               : in.chunk_counts[(source * kMaxChunks + chunk) * static_cast<int64_t>(columns) +
                                                 in.num_local + world.rank];
    geometry[Geometry::chunk_rows(size) + i] = row;
  }
  const Control* control = world.control[world.rank];
  if (threadIdx.x < size) {
    geometry[Geometry::kTokens + threadIdx.x] =
        static_cast<int32_t>(control->headers[threadIdx.x][turn.slot].words[kTokensWord]);
  }
  if (threadIdx.x == 0) {
    const bool overflows = in.max_rows >= 0 && totals.num_rows > in.max_rows;
    geometry[Geometry::kCompactRows] = totals.num_compact_rows;
    geometry[Geometry::kRows] = totals.num_rows;
    geometry[Geometry::kOverflowed] = overflows;
    geometry[Geometry::kNoPlan] = 0;
    if (overflows && load_acquire(&world.record->overflow.valid) == 0) {
      world.record->overflow.values[0] = totals.num_rows;
      world.record->overflow.values[1] = in.max_rows;
      store_release(&world.record->overflow.valid, 1);
    }
  }
  if (call.question == 0) {
    return;
  }
  HostRecord* record = world.record;
  for (int i = threadIdx.x; i < in.num_local; i += kPlanThreads) {
    record->expert_counts[i] = expert_counts[i];
  }
  for (int i = threadIdx.x; i < size * size; i += kPlanThreads) {
    record->rank_rows[i / size][i % size] = totals.rank_rows[i / size][i % size];
  }
  if (threadIdx.x < size) {
    record->rank_tokens[threadIdx.x] = control->headers[threadIdx.x][turn.slot].words[kTokensWord];
    record->recv_pairs[threadIdx.x] = totals.recv_pairs[threadIdx.x];
  }
  if (threadIdx.x == 0) {
    record->num_compact_rows = totals.num_compact_rows;
    record->num_rows = totals.num_rows;
    int64_t x_needs_grad = 0, weights_need_grad = 0;
    for (int rank = 0; rank < size; ++rank) {
      x_needs_grad |= control->headers[rank][turn.slot].words[kXNeedsGradWord];
      weights_need_grad |= control->headers[rank][turn.slot].words[kWeightsNeedGradWord];
    }
    record->x_needs_grad = x_needs_grad;
    record->weights_need_grad = weights_need_grad;
  }
  __threadfence_system();
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
  int32_t* tile = shared + warp_idx() * (kTile + columns);
  int32_t* counters = tile + kTile;
  constexpr uint32_t kUnknown = ~0u;
  const uint32_t num_chunk_tickets = (world.size * kMaxChunks + kPlanWarps - 1) / kPlanWarps;

  if (threadIdx.x < 32) {
    const bool ready = state->failed == 0 && slots_are_free(world, turn);
    if (threadIdx.x == 0) {
      verdict = ready ? kUnknown : kFailed;
    }
  }
  __syncthreads();
  while (verdict == kUnknown || verdict == kGo) {
    const uint32_t ticket = block_ticket(state);
    if (ticket < kPublishTickets) {
      if (call.header[kStatusWord] == kFine) {
        publish(call, in, turn, ticket);
      } else if (threadIdx.x == 0) {
        atomicAdd(&state->num_published, 1u);
      }
      continue;
    }
    if (ticket > kPublishTickets + num_chunk_tickets + 1) {
      break;
    }
    if (ticket == kPublishTickets) {
      if (threadIdx.x < 32) {
        bool ready = true;
        if (threadIdx.x == 0) {
          ready = wait_counter(world, turn, &state->num_published, kPublishTickets);
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
    if (ticket <= kPublishTickets + num_chunk_tickets) {
      const int number = (ticket - kPublishTickets - 1) * kPlanWarps + warp_idx();
      if (number < world.size * kMaxChunks) {
        count_chunk(world, in, turn, number, tile, counters);
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        atomicAdd(&state->num_counted, 1u);
      }
      continue;
    }
    __shared__ bool counted;
    if (threadIdx.x == 0) {
      counted = wait_counter(world, turn, &state->num_counted, num_chunk_tickets);
      __threadfence();
    }
    __syncthreads();
    if (counted) {
      sum_up(call, in, turn, shared);
    }
    break;
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
      if (call.question != 0) {
        world.record->verdict = kGo;
        world.record->epoch = turn.epoch;
        __threadfence_system();
        store_release(&world.record->answered, call.question);
      }
    }
    return;
  }
  // Calls that follow it without a host wait give NaN.
  const int length = Geometry::length(world.size, in.num_local);
  for (int i = threadIdx.x; i < length; i += kPlanThreads) {
    in.geometry[i] = i == Geometry::kOverflowed || i == Geometry::kNoPlan;
  }
  for (int i = threadIdx.x; i <= in.num_local; i += kPlanThreads) {
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
  const int num_bytes = plan_shared_bytes(call, input, 1);
  allow_shared_memory<moe_ep_plan_count>(num_bytes, "plan_count: the shared memory for the counters");
  moe_ep_plan_count<<<num_sms, kPlanThreads, num_bytes, stream>>>(call, input);
  check_cuda(cudaGetLastError(), "plan_count: the launch");
}

}  // namespace moe_ep
