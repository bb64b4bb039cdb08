// What the counts of a plan's chunks add up to: for the host that waits, for the caller, and for the kernels that
// follow.
#pragma once

#include "intranode_chunk.cuh"

namespace moe_ep {

__device__ inline int exclusive_scan(int value, int* total) {
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, sum, step);
    sum += lane_idx() >= step ? before : 0;
  }
  *total = __shfl_sync(kFullWarp, sum, 31);
  return sum - value;
}

// By a whole warp: turns one column of chunk counts into exclusive sums, over all chunks (`carries`) or within each
// source.
__device__ inline void scan_column(const World& world, int32_t* column, int64_t stride, bool carries) {
  constexpr int kSources = 4;  // whose counts are on their way at once
  const int lane = lane_idx();
  int carry = 0;
  for (int first = 0; first < world.size; first += kSources) {
    int values[kSources][2];
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      const int32_t* const counts = column + ((first + j) * kMaxChunks + 2 * lane) * stride;
      if (first + j < world.size) {
        values[j][0] = counts[0];
        values[j][1] = counts[stride];
      }
    }
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      int32_t* const sums = column + ((first + j) * kMaxChunks + 2 * lane) * stride;
      if (first + j < world.size) {
        int total;
        const int before = exclusive_scan(values[j][0] + values[j][1], &total) + (carries ? carry : 0);
        sums[0] = before;
        sums[stride] = before + values[j][0];
        carry += total;
      }
    }
  }
}

struct Totals {
  int rank_rows[kMaxRanks * kMaxRanks];  // as in State::Sums
  int recv_pairs[kMaxRanks];
  int num_rows;
  int num_compact_rows;
};

// The caller's rows end at max_rows, also where more came: no GEMM may be sent behind them.
__device__ inline int32_t offset_for_caller(const PlanInput& in, int64_t offset) {
  const bool is_cut = in.expert_major && in.max_rows >= 0 && offset > in.max_rows;
  return static_cast<int32_t>(is_cut ? in.max_rows : offset);
}

// By a whole block: takes the sums over all chunks, and leaves zeros for the next plan.
__device__ inline void take_sums(const World& world, const PlanInput& in, Totals& totals, int32_t* expert_counts) {
  State::Sums& sums = world.state->sums;
  const auto take = [](int32_t& sum) {
    const int32_t value = __ldcg(&sum);
    sum = 0;
    return value;
  };
  for (int i = threadIdx.x; i < in.num_local; i += kPlanThreads) {
    expert_counts[i] = take(sums.experts[i]);
  }
  if (threadIdx.x < world.size * world.size) {
    totals.rank_rows[threadIdx.x] = take(sums.rank_rows[threadIdx.x]);
  }
  if (threadIdx.x < world.size) {
    totals.recv_pairs[threadIdx.x] = take(sums.pairs[threadIdx.x]);
  }
  __syncthreads();
}

// By a whole warp: where the rows of each expert begin, and how many rows there are.
__device__ inline void place_experts(const World& world, const PlanInput& in, Totals& totals,
                                     const int32_t* expert_counts) {
  const int size = world.size, lane = lane_idx();
  int32_t* offsets = in.geometry + Geometry::expert_offsets(size);
  int32_t* counts = in.geometry + Geometry::expert_counts(size, in.num_local);
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
      compact += totals.rank_rows[source * size + world.rank];
    }
    totals.num_compact_rows = compact;
    totals.num_rows = in.expert_major ? static_cast<int>(carry) : compact;
  }
}

// By a whole block: the counts, and with them the answer, to the host that waits. All headers have come and say go, so
// the host need not wait for what is left to do; its next kernel does.
__device__ inline void tell_host(const Call& call, const PlanInput& in, const Turn& turn, const Totals& totals,
                                 const int32_t* expert_counts) {
  const int size = call.world.size;
  const Control* control = call.world.control[call.world.rank];
  HostRecord* record = call.world.record;
  for (int i = threadIdx.x; i < in.num_local; i += kPlanThreads) {
    record->expert_counts[i] = expert_counts[i];
  }
  if (threadIdx.x < size * size) {
    record->rank_rows[threadIdx.x / size][threadIdx.x % size] = totals.rank_rows[threadIdx.x];
  }
  if (threadIdx.x < 32) {
    const int lane = lane_idx();
    const int64_t* words = control->headers[lane < size ? lane : 0][turn.slot].words;
    if (lane < size) {
      record->rank_tokens[lane] = words[kTokensWord];
      record->recv_pairs[lane] = totals.recv_pairs[lane];
    }
    const bool x_needs_grad = __any_sync(kFullWarp, words[kXNeedsGradWord] != 0);
    const bool weights_need_grad = __any_sync(kFullWarp, words[kWeightsNeedGradWord] != 0);
    if (lane == 0) {
      record->num_compact_rows = totals.num_compact_rows;
      record->num_rows = totals.num_rows;
      record->x_needs_grad = x_needs_grad;
      record->weights_need_grad = weights_need_grad;
      record->verdict = kGo;
      record->epoch = turn.epoch;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    store_release(&record->answered, call.question);
  }
}

// By a whole block: where each chunk's rows begin, for the kernels that follow.
__device__ inline void place_chunks(const World& world, const PlanInput& in, const Turn& turn, const Totals& totals) {
  const int size = world.size, columns = in.num_local + size;
  int32_t* geometry = in.geometry;
  for (int i = warp_idx(); i < columns; i += kPlanWarps) {
    scan_column(world, in.chunk_counts + i, columns, i < in.num_local);
  }
  __syncthreads();
  if (threadIdx.x < size * size) {
    geometry[Geometry::rank_rows(size) + threadIdx.x] = totals.rank_rows[threadIdx.x];
  }
  for (int i = threadIdx.x; i < size * (kMaxChunks + 1); i += kPlanThreads) {
    const int source = i / (kMaxChunks + 1), chunk = i % (kMaxChunks + 1);
    int row = 0;
    for (int before = 0; before < source; ++before) {
      row += totals.rank_rows[before * size + world.rank];
    }
    row += chunk == kMaxChunks ? totals.rank_rows[source * size + world.rank]
                               : in.chunk_counts[(source * kMaxChunks + chunk) * static_cast<int64_t>(columns) +
                                                 in.num_local + world.rank];
    geometry[Geometry::chunk_rows(size) + i] = row;
  }
  if (threadIdx.x < size) {
    geometry[Geometry::kTokens + threadIdx.x] =
        static_cast<int32_t>(world.control[world.rank]->headers[threadIdx.x][turn.slot].words[kTokensWord]);
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
}

// By the last working block: sums over chunks, what the host waits for, and the geometry.
__device__ inline void sum_up(const Call& call, const PlanInput& in, const Turn& turn, int32_t* expert_counts) {
  __shared__ Totals totals;
  static_assert(kMaxRanks * kMaxRanks <= kPlanThreads, "a thread for each pair of ranks");
  take_sums(call.world, in, totals, expert_counts);
  if (warp_idx() == 0) {
    place_experts(call.world, in, totals, expert_counts);
  }
  __syncthreads();
  if (call.question != 0) {
    tell_host(call, in, turn, totals, expert_counts);
  }
  place_chunks(call.world, in, turn, totals);
}

}  // namespace moe_ep
