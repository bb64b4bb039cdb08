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

// By a whole warp: part `part` of the row number `row` to the rank where its token is at home.
template <typename Hop>
__device__ void send_part(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyCombine& in,
                          const int32_t (&mask)[kMaxLowLatencyRanks], int num_units, int row, int part) {
  const int32_t from_place = in.row_places[2 * (1 + row)], goes_to = in.row_places[2 * (1 + row) + 1];
  const int pairs_a_rank = in.shape.max_tokens * in.shape.num_topk;
  const int home = goes_to / pairs_a_rank, pair = goes_to % pairs_a_rank;
  if (mask[home] != kOpen) {
    return;
  }
  const int64_t row_bytes = static_cast<int64_t>(num_units) * kUnitBytes;
  const int first = part * kPartUnits;
  char* to = rows_to<Hop>(call, home, turn.slot) + static_cast<int64_t>(pair) * in.shape.row_bytes;
  copy_units<8>(to + first * kUnitBytes, in.rows + from_place * row_bytes + first * kUnitBytes,
                min(kPartUnits, num_units - first));
  if constexpr (Hop::kPuts) {
    if (is_far<Hop>(call, home)) {
      uint64_t* words = words_of<Hop>(call, home, turn.slot, call.world.rank);
      put_row<Hop>(call, turn, home, to + first * kUnitBytes, min(kPartUnits, num_units - first) * kUnitBytes,
                   words + static_cast<int64_t>(pair) * num_parts(num_units) + part, word_of(turn, 0));
      return;
    }
  }
  __syncwarp();
  if (lane_idx() == 0) {
    uint64_t* words = words_of(call, home, turn.slot, call.world.rank);
    store_release(words + static_cast<int64_t>(pair) * num_parts(num_units) + part, word_of(turn, 0));
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
      for (int task = warp_idx() * gridDim.x + blockIdx.x; task < num_tasks; task += gridDim.x * kCombineWarps) {
        send_part<Hop>(call, turn, in, mask, num_units, task / num_parts(num_units), task % num_parts(num_units));
      }
    }
    if (!call.receives) {
      if (is_last(&call.state->num_sent)) {
        end_sending(call, turn);
      }
      return;
    }
  }
  bool fine = sum_rows<Hop, Elem>(call, turn, in, num_units, blockIdx.x, gridDim.x);
  if (!is_last(&call.state->num_received[turn.slot])) {
    return;
  }
  while (take_lost(call, turn)) {
    fine = sum_rows<Hop, Elem>(call, turn, in, num_units, 0, 1);
  }
  if (!fine || has_failed(call)) {
    float nan[RowMath<Elem>::kElems];
    for (float& value : nan) {
      value = __int_as_float(0x7FC00000);
    }
    for (int64_t i = threadIdx.x; i < in.num_tokens * num_units; i += kCombineThreads) {
      store_16(in.out + i * kUnitBytes, RowMath<Elem>::rounded(nan));
    }
  }
  __syncthreads();
  end_receiving<Hop>(call, turn, !fine);
  if (call.sends) {
    end_sending(call, turn);
  }
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
  end_receiving<Hop>(call, turn, false);
  end_sending(call, turn);
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
