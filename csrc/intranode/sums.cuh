// What the counts of a plan's chunks add up to: for the host that waits, for the caller, and for the kernels that
// follow.
#pragma once

#include "intranode/chunk.cuh"

namespace moe_ep {

// By a whole warp: turns column `i` of chunk counts into exclusive sums, over all chunks for an expert, within each
// source for a rank. Those of the own rank say at which row each chunk begins, for the kernels that follow.
__device__ inline void scan_column(const World& world, const PlanInput& in, int i) {
  constexpr int kSources = 2;  // whose counts are on their way at once
  static_assert(kMaxChunks == 64, "two chunks for each lane");
  const int lane = lane_idx();
  const int64_t columns = in.num_local + world.size;
  const bool is_expert = i < in.num_local, is_own = i == in.num_local + world.rank;
  int32_t* const column = in.chunk_counts + i;
  int carry = 0;
#pragma unroll 1
  for (int first = 0; first < world.size; first += kSources) {
    int values[kSources][2];
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      const int32_t* const counts = column + ((first + j) * kMaxChunks + 2 * lane) * columns;
      if (first + j < world.size) {
        values[j][0] = counts[0];
        values[j][1] = counts[columns];
      }
    }
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      const int source = first + j;
      if (source < world.size) {
        int32_t* const sums = column + (source * kMaxChunks + 2 * lane) * columns;
        int total;
        const int within = exclusive_scan(values[j][0] + values[j][1], &total), before = carry + within;
        sums[0] = is_expert ? before : within;
        sums[columns] = (is_expert ? before : within) + values[j][0];
        if (is_own) {
          int32_t* const rows = in.geometry + Geometry::chunk_rows(world.size) + source * (kMaxChunks + 1) + 2 * lane;
          rows[0] = before;
          rows[1] = before + values[j][0];
          if (lane == 31) {
            rows[2] = carry + total;
          }
        }
        carry += total;
      }
    }
  }
}

// By a whole block: a column for each warp, `part` of them all.
__device__ inline void scan_columns(const World& world, const PlanInput& in, int part) {
  const int i = part * static_cast<int>(blockDim.x / 32) + warp_idx();
  if (i < in.num_local + world.size) {
    scan_column(world, in, i);
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
  for (int i = threadIdx.x; i < in.num_local; i += blockDim.x) {
    expert_counts[i] = take(sums.experts[i]);
  }
  for (int i = threadIdx.x; i < world.size * world.size; i += blockDim.x) {
    totals.rank_rows[i] = take(sums.rank_rows[i]);
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
  for (int i = threadIdx.x; i < in.num_local; i += blockDim.x) {
    record->expert_counts[i] = expert_counts[i];
  }
  for (int i = threadIdx.x; i < size * size; i += blockDim.x) {
    record->rank_rows[i / size][i % size] = totals.rank_rows[i];
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

// By a whole block: what else the kernels that follow have to know.
__device__ inline void fill_geometry(const World& world, const PlanInput& in, const Turn& turn, const Totals& totals) {
  const int size = world.size;
  int32_t* geometry = in.geometry;
  for (int i = threadIdx.x; i < size * size; i += blockDim.x) {
    geometry[Geometry::rank_rows(size) + i] = totals.rank_rows[i];
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

// By a whole block: sums over chunks, what the host waits for, and the geometry.
__device__ inline void sum_up(const Call& call, const PlanInput& in, const Turn& turn, int32_t* expert_counts) {
  __shared__ Totals totals;
  take_sums(call.world, in, totals, expert_counts);
  if (warp_idx() == 0) {
    place_experts(call.world, in, totals, expert_counts);
  }
  __syncthreads();
  if (call.question != 0) {
    tell_host(call, in, turn, totals, expert_counts);
  }
  fill_geometry(call.world, in, turn, totals);
}

}  // namespace moe_ep
