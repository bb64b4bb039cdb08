// Dispatch for any hop.
#pragma once

#include <type_traits>

#include "common/check.h"
#include "common/shared_memory.h"
#include "low_latency/low_latency.h"
#include "low_latency/receive.cuh"

namespace moe_ep {

// Sends, or receives, or both; the last block ends either. Blocks wait for rows of other blocks of the same grid, which
// therefore has to find room on the device as a whole; what else runs there may delay it, but not wait for it.
template <typename Hop, bool kFp8>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    moe_ep_low_latency_dispatch(const __grid_constant__ LowLatencyCall call,
                                const __grid_constant__ LowLatencyDispatch in, int num_cached) {
  extern __shared__ int32_t shared_ints[];
  __shared__ SendShared shared;
  __shared__ bool open[kMaxLowLatencyRanks];
  const LowLatencyTurn turn = low_latency_turn(call);
  const int num_keys = call.world.size * in.shape.most_local;
  const ReceiveShared received = {shared_ints + num_cached, shared_ints + num_cached + num_keys,
                                  shared_ints + num_cached + 2 * num_keys};
  if (call.sends) {
    const bool counts = blockIdx.x == gridDim.x - 1;
    const auto key_at = [&](int pair) { return pair < num_cached ? shared_ints[pair] : key_of(in, pair); };
    Units units;  // of the token in hand, on their way
    load_units<kFp8>(in, blockIdx.x, 0, units);
    if (counts) {
      begin_counts(in, num_keys, received.counts, shared);
    }
    if (threadIdx.x >= 32) {  // the first warp looks for acks
      constexpr int kStep = kDispatchThreads - 32;
      cache_keys(in, num_cached, threadIdx.x - 32, kStep, shared_ints);
      if (counts) {
        count_pairs(in, threadIdx.x - 32, kStep, key_at, received.counts, shared);
      }
    }
    if (begin_sending<Hop>(call, turn, shared.mask)) {
      if (counts) {
        send_counts<Hop>(call, turn, in, num_keys, received.counts, shared);
      }
      for (int token = blockIdx.x; token < in.num_tokens; token += gridDim.x) {
        send_token<Hop, kFp8>(call, turn, in, token, key_at, shared, units);
        load_units<kFp8>(in, token + gridDim.x, 0, units);
      }
    }
    if (!call.receives) {
      if (is_last(call, &call.state->num_sent)) {
        end_sending(call, turn, look_at_end(call));
      }
      return;
    }
  }
  bool fine = receive_rows<Hop, kFp8>(call, turn, in, received, blockIdx.x, gridDim.x, open);
  if (!is_last(call, &call.state->num_received[turn.slot])) {
    return;
  }
  while (take_lost(call, turn)) {
    fine = receive_rows<Hop, kFp8>(call, turn, in, received, 0, 1, open);
  }
  const LowLatencyEnd end = look_at_end(call);
  if (!fine || end.has_failed) {
    receive_nothing(call, in);
  } else {
    close_slots(call, in, open);
    for (int expert = threadIdx.x; in.cumulative != nullptr && expert < in.num_local; expert += kDispatchThreads) {
      in.cumulative[expert] += rows_of_expert(received, call.world.size, expert);
    }
  }
  __syncthreads();
  if (call.sends) {
    end_sending(call, turn, end);
  }
  end_receiving<Hop>(call, turn, end, !fine);
}

template <typename Hop>
void launch_low_latency_dispatch(const LowLatencyCall& call, const LowLatencyDispatch& dispatch, int num_blocks,
                                 cudaStream_t stream) {
  const int64_t num_pairs = dispatch.num_tokens * dispatch.shape.num_topk;
  const int num_cached = call.sends ? static_cast<int>(min64(num_pairs, kMaxCachedKeys)) : 0;
  const int num_keys = call.world.size * dispatch.shape.most_local;
  const int shared_bytes = (num_cached + 3 * num_keys + 1) * static_cast<int>(sizeof(int32_t));
  const auto launch = [&](auto is_fp8) {
    constexpr bool kFp8 = decltype(is_fp8)::value;
    allow_shared_memory<moe_ep_low_latency_dispatch<Hop, kFp8>>(shared_bytes, "low_latency_dispatch: shared memory");
    moe_ep_low_latency_dispatch<Hop, kFp8>
        <<<num_blocks, kDispatchThreads, shared_bytes, stream>>>(call, dispatch, num_cached);
  };
  if (dispatch.format == LowLatencyFormat::kAsGiven) {
    launch(std::false_type());
  } else {
    launch(std::true_type());
  }
  check_cuda(cudaGetLastError(), "low_latency_dispatch: the launch");
}

template <typename Hop>
void load_low_latency_dispatch() {
  cudaFuncAttributes attributes;
  const auto load = [&](auto kernel) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "low_latency_dispatch: loading");
  };
  load(moe_ep_low_latency_dispatch<Hop, false>);
  load(moe_ep_low_latency_dispatch<Hop, true>);
}

}  // namespace moe_ep
