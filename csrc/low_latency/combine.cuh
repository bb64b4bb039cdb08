// Combine for any hop, and the calls that carry no rows.
#pragma once

#include "common/check.h"
#include "common/row_math.cuh"
#include "low_latency/device.cuh"
#include "low_latency/low_latency.h"

namespace moe_ep {

constexpr int kCombineThreads = 512;
constexpr int kCombineWarps = kCombineThreads / 32;
constexpr int kUnitsALane = kPieceUnits / 32;

__device__ inline int row_units(const LowLatencyCombine& in, int elem_bytes) {
  return in.shape.hidden * elem_bytes / kUnitBytes;
}

constexpr int kMostParts = 4;  // that a warp sends together, since a release takes as long for one as for all
constexpr int kPartUnitsALane = kPartUnits / 32;

// By a whole warp: this lane's units of a part, and where they go.
struct PartCopy {
  char* to;
  int num_units;
  uint4 units[kPartUnitsALane];

  __device__ void load(const char* from, char* home, int count) {
    to = home;
    num_units = count;
#pragma unroll
    for (int i = 0; i < kPartUnitsALane; ++i) {
      if (lane_idx() + 32 * i < count) {
        units[i] = load_16(from + (lane_idx() + 32 * i) * kUnitBytes);
      }
    }
  }
  __device__ void store() const {
#pragma unroll
    for (int i = 0; i < kPartUnitsALane; ++i) {
      if (lane_idx() + 32 * i < num_units) {
        store_16(to + (lane_idx() + 32 * i) * kUnitBytes, units[i]);
      }
    }
  }
};

// By a whole warp: parts `first` to `first + count` (at most kMostParts) of all rows, to the ranks where their tokens
// are at home. Part number i is part i % P of row i / P; lane j knows where part number first + j goes.
template <typename Hop>
__device__ void send_parts(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyCombine& in,
                           const int32_t (&mask)[kMaxLowLatencyRanks], int num_units, int first, int count) {
  const int parts = num_parts(num_units), pairs_a_rank = in.shape.max_tokens * in.shape.num_topk;
  const int64_t row_bytes = static_cast<int64_t>(num_units) * kUnitBytes;
  int my_place = 0, my_home = -1, my_pair = 0;
  if (lane_idx() < count) {
    const int row = (first + lane_idx()) / parts;
    my_place = in.row_places[2 * (1 + row)];
    const int goes_to = in.row_places[2 * (1 + row) + 1];
    my_home = goes_to / pairs_a_rank;
    my_pair = goes_to % pairs_a_rank;
    my_home = mask[my_home] == kOpen ? my_home : -1;
  }
  const auto word_of_part = [&](int home, int pair, int part) {
    return words_of<Hop>(call, home, turn.slot, call.world.rank) + static_cast<int64_t>(pair) * parts + part;
  };
  PartCopy copy;
  const auto load = [&](int i) {
    const int home = __shfl_sync(kFullWarp, my_home, i), begin = (first + i) % parts * kPartUnits;
    const int64_t place = __shfl_sync(kFullWarp, my_place, i), pair = __shfl_sync(kFullWarp, my_pair, i);
    if (home < 0) {
      copy.num_units = 0;
      return;
    }
    char* row = rows_to<Hop>(call, home, turn.slot) + pair * in.shape.row_bytes;
    copy.load(in.rows + place * row_bytes + begin * kUnitBytes, row + begin * kUnitBytes,
              min(kPartUnits, num_units - begin));
  };
  load(0);
  for (int i = 0; i < count; ++i) {
    const PartCopy ready = copy;
    if (i + 1 < count) {
      load(i + 1);  // under way while this one is stored
    }
    ready.store();
    if constexpr (Hop::kPuts) {
      const int home = __shfl_sync(kFullWarp, my_home, i), pair = __shfl_sync(kFullWarp, my_pair, i);
      if (home >= 0 && is_far<Hop>(call, home)) {
        put_row<Hop>(call, turn, home, ready.to, ready.num_units * kUnitBytes,
                     word_of_part(home, pair, (first + i) % parts), word_of(turn, 0));
      }
    }
  }
  __syncwarp();
  if (my_home >= 0 && !is_far<Hop>(call, my_home)) {
    store_release(word_of_part(my_home, my_pair, (first + lane_idx()) % parts), word_of(turn, 0));
  }
}

// By a whole warp: which slots of a token count, as bits; waits until this part of their rows is here. Lane i knows who
// owns the slots i and i + 32.
struct SlotSet {
  uint64_t used;
  bool dropped;
  int32_t low_owner, high_owner;
};
static_assert(kMaxTopk == 64, "a lane knows two slots");

template <typename Hop>
__device__ SlotSet wait_slots(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyCombine& in,
                              const bool (&open)[kMaxLowLatencyRanks], int num_units, int token, int part,
                              uint64_t began) {
  const int num_topk = in.shape.num_topk;
  SlotSet set = {0, false, -1, -1};
#pragma unroll
  for (int first = 0; first < kMaxTopk; first += 32) {
    if (first >= num_topk) {
      break;
    }
    const int slot = first + lane_idx();
    const int owner = slot < num_topk ? in.slot_rank[token * num_topk + slot] : -1;
    (first == 0 ? set.low_owner : set.high_owner) = owner;
    bool arrived = false;
    if (owner >= 0 && open[owner]) {
      const int64_t word = static_cast<int64_t>(token * num_topk + slot) * num_parts(num_units) + part;
      const uint64_t* words = words_of(call, call.world.rank, turn.slot, owner);
      arrived = wait_value<Hop>(call, turn, owner, kWaitFlag, words + word, kMaxPairs) != kMaxPairs;
      charge_wait(call, turn, owner, began);
    }
    set.used |= static_cast<uint64_t>(__ballot_sync(kFullWarp, arrived)) << first;
    set.dropped |= __any_sync(kFullWarp, owner == kDropped);
  }
  return set;
}

// By a whole warp: one piece of a token's sum, slots ascending.
template <typename Elem>
__device__ void sum_piece(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyCombine& in,
                          const SlotSet& set, int num_units, int token, int piece) {
  using Math = RowMath<Elem>;
  constexpr int kElems = Math::kElems;
  const int first = piece * kPieceUnits + lane_idx();
  const int64_t from = static_cast<int64_t>(token) * in.shape.num_topk * in.shape.row_bytes;
  const auto load = [&](int slot, uint4(&units)[kUnitsALane]) {
    const int owner = __shfl_sync(kFullWarp, slot < 32 ? set.low_owner : set.high_owner, slot % 32);
    const char* row =
        rows_of(call, call.world.rank, turn.slot, owner) + from + static_cast<int64_t>(slot) * in.shape.row_bytes;
#pragma unroll
    for (int i = 0; i < kUnitsALane; ++i) {
      const int unit = first + 32 * i;
      units[i] = unit < num_units ? load_16(row + unit * kUnitBytes) : make_uint4(0, 0, 0, 0);
    }
  };
  float totals[kUnitsALane][kElems] = {};
  for (int i = 0; i < kUnitsALane && set.used != 0; ++i) {
    Math::begin(totals[i]);
  }
  const auto add = [&](int slot, const uint4(&units)[kUnitsALane]) {
    const float weight = in.weights[token * in.shape.num_topk + slot];
#pragma unroll
    for (int i = 0; i < kUnitsALane; ++i) {
      Math::add_product(totals[i], units[i], weight);
    }
  };
  uint64_t left = set.used;
  while (left != 0) {  // two rows under way at a time
    uint4 one[kUnitsALane], two[kUnitsALane];
    const int slot = __ffsll(static_cast<long long>(left)) - 1;
    left &= left - 1;
    const int next = left != 0 ? __ffsll(static_cast<long long>(left)) - 1 : -1;
    left &= left - (left != 0);
    load(slot, one);
    if (next >= 0) {
      load(next, two);
    }
    add(slot, one);
    if (next >= 0) {
      add(next, two);
    }
  }
  char* out = in.out + static_cast<int64_t>(token) * num_units * kUnitBytes;
#pragma unroll
  for (int i = 0; i < kUnitsALane; ++i) {
    if (set.dropped) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
        totals[i][j] = __int_as_float(0x7FC00000);
      }
    }
    if (first + 32 * i < num_units) {
      store_16(out + (first + 32 * i) * kUnitBytes, Math::rounded(totals[i]));
    }
  }
}

// By a whole block, the `block`-th of `num_blocks` that share the work. False where the call is given up.
template <typename Hop, typename Elem>
__device__ bool sum_rows(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyCombine& in,
                         int num_units, int block, int num_blocks) {
  __shared__ bool open[kMaxLowLatencyRanks];
  const uint64_t began = now_ns();
  if (!begin_receiving<Hop>(call, turn, block == 0, open)) {
    return false;
  }
  const int num_pieces = (num_units + kPieceUnits - 1) / kPieceUnits;
  const int num_tasks = static_cast<int>(in.num_tokens) * num_pieces;
  for (int task = warp_idx() * num_blocks + block; task < num_tasks; task += num_blocks * kCombineWarps) {
    const int token = task / num_pieces, piece = task % num_pieces;
    const SlotSet set =
        wait_slots<Hop>(call, turn, in, open, num_units, token, piece * kPieceUnits / kPartUnits, began);
    __syncwarp();
    sum_piece<Elem>(call, turn, in, set, num_units, token, piece);
  }
  __syncthreads();
  return true;
}

// Blocks wait for rows of other blocks of the same grid; see moe_ep_low_latency_dispatch.
template <typename Hop, typename Elem>
__global__ void __launch_bounds__(kCombineThreads, 1)
    moe_ep_low_latency_combine(const __grid_constant__ LowLatencyCall call,
                               const __grid_constant__ LowLatencyCombine in) {
  __shared__ int32_t mask[kMaxLowLatencyRanks];
  const LowLatencyTurn turn = low_latency_turn(call);
  const int num_units = row_units(in, sizeof(Elem));
  if (call.sends) {
    const int num_tasks = in.row_places[0] * num_parts(num_units);
    if (begin_sending<Hop>(call, turn, mask)) {
      if (blockIdx.x == 0 && threadIdx.x < static_cast<unsigned int>(call.world.size)) {
        greet<Hop>(call, turn, threadIdx.x, mask[threadIdx.x], call.print);
      }
      const int num_warps = gridDim.x * kCombineWarps, even = (num_tasks + num_warps - 1) / num_warps;
      const int together = min(max(even, 1), kMostParts);
      for (int i = warp_idx() * gridDim.x + blockIdx.x; i * together < num_tasks; i += num_warps) {
        send_parts<Hop>(call, turn, in, mask, num_units, i * together, min(together, num_tasks - i * together));
      }
    }
    if (!call.receives) {
      if (is_last(call, &call.state->num_sent)) {
        end_sending(call, turn, look_at_end(call));
      }
      return;
    }
  }
  bool fine = sum_rows<Hop, Elem>(call, turn, in, num_units, blockIdx.x, gridDim.x);
  if (!is_last(call, &call.state->num_received[turn.slot])) {
    return;
  }
  while (take_lost(call, turn)) {
    fine = sum_rows<Hop, Elem>(call, turn, in, num_units, 0, 1);
  }
  const LowLatencyEnd end = look_at_end(call);
  if (!fine || end.has_failed) {
    float nan[RowMath<Elem>::kElems];
    for (float& value : nan) {
      value = __int_as_float(0x7FC00000);
    }
    for (int64_t i = threadIdx.x; i < in.num_tokens * num_units; i += kCombineThreads) {
      store_16(in.out + i * kUnitBytes, RowMath<Elem>::rounded(nan));
    }
  }
  __syncthreads();
  if (call.sends) {
    end_sending(call, turn, end);
  }
  end_receiving<Hop>(call, turn, end, !fine);
}

// Waits as every call does before it writes a slot, and reads nothing of the peers.
template <typename Hop>
__global__ void moe_ep_low_latency_refusal(const __grid_constant__ LowLatencyCall call) {
  __shared__ int32_t mask[kMaxLowLatencyRanks];
  const LowLatencyTurn turn = low_latency_turn(call);
  if (begin_sending<Hop>(call, turn, mask) && threadIdx.x < static_cast<unsigned int>(call.world.size)) {
    greet<Hop>(call, turn, threadIdx.x, mask[threadIdx.x], kRefusedBit | call.print);
  }
  __syncthreads();
  const LowLatencyEnd end = look_at_end(call);
  end_sending(call, turn, end);
  end_receiving<Hop>(call, turn, end, false);
}

// Waits until every peer has read what this rank sent, so that nobody writes into this rank's memory any more.
template <typename Hop>
__global__ void moe_ep_low_latency_drain(const __grid_constant__ LowLatencyCall call) {
  __shared__ int32_t mask[kMaxLowLatencyRanks];
  LowLatencyTurn turn = low_latency_turn(call);
  begin_sending<Hop>(call, turn, mask);
  turn.slot = 1 - turn.slot;
  begin_sending<Hop>(call, turn, mask);
}

template <typename Hop>
void launch_low_latency_combine(const LowLatencyCall& call, const LowLatencyCombine& combine, RowKind kind,
                                int num_blocks, cudaStream_t stream) {
  switch (kind) {
    case RowKind::kBFloat16:
      moe_ep_low_latency_combine<Hop, __nv_bfloat16><<<num_blocks, kCombineThreads, 0, stream>>>(call, combine);
      break;
    case RowKind::kFloat16:
      moe_ep_low_latency_combine<Hop, __half><<<num_blocks, kCombineThreads, 0, stream>>>(call, combine);
      break;
    case RowKind::kFloat32:
      moe_ep_low_latency_combine<Hop, float><<<num_blocks, kCombineThreads, 0, stream>>>(call, combine);
      break;
    case RowKind::kFloat64:
      fail("low_latency_combine: rows are bfloat16, float16 or float32: convert them.");
  }
  check_cuda(cudaGetLastError(), "low_latency_combine: the launch");
}

template <typename Hop>
void launch_low_latency_refusal(const LowLatencyCall& call, cudaStream_t stream) {
  moe_ep_low_latency_refusal<Hop><<<1, kMaxLowLatencyRanks, 0, stream>>>(call);
  check_cuda(cudaGetLastError(), "low-latency refusal: the launch");
}

template <typename Hop>
void launch_low_latency_drain(const LowLatencyCall& call, cudaStream_t stream) {
  moe_ep_low_latency_drain<Hop><<<1, kMaxLowLatencyRanks, 0, stream>>>(call);
  check_cuda(cudaGetLastError(), "low-latency drain: the launch");
}

template <typename Hop>
void load_low_latency_combine() {
  cudaFuncAttributes attributes;
  const auto load = [&](auto kernel) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "low_latency_combine: loading");
  };
  load(moe_ep_low_latency_combine<Hop, __nv_bfloat16>);
  load(moe_ep_low_latency_combine<Hop, __half>);
  load(moe_ep_low_latency_combine<Hop, float>);
  load(moe_ep_low_latency_refusal<Hop>);
  load(moe_ep_low_latency_drain<Hop>);
}

}  // namespace moe_ep
