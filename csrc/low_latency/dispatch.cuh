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
    if (threadIdx.x >= 32) {  // the first warp looks for acks
      cache_keys(in, num_cached, threadIdx.x - 32, kDispatchThreads - 32, shared_ints);
    }
    const auto key_at = [&](int pair) { return pair < num_cached ? shared_ints[pair] : key_of(in, pair); };
    if (begin_sending<Hop>(call, turn, shared.mask)) {
      if (blockIdx.x == gridDim.x - 1) {
        send_counts<Hop>(call, turn, in, key_at, shared, received.counts);
      }
      for (int token = blockIdx.x; token < in.num_tokens; token += gridDim.x) {
        send_token<Hop, kFp8>(call, turn, in, token, key_at, shared);
      }
    }
    if (!call.receives) {
      if (is_last(&call.state->num_sent)) {
        end_sending(call, turn);
      }
      return;
    }
  }
  bool fine = receive_rows<Hop, kFp8>(call, turn, in, received, blockIdx.x, gridDim.x, open);
  if (!is_last(&call.state->num_received[turn.slot])) {
    return;
  }
  while (take_lost(call, turn)) {
    fine = receive_rows<Hop, kFp8>(call, turn, in, received, 0, 1, open);
  }
  if (!fine || has_failed(call)) {
    receive_nothing(call, in);
  } else {
    close_slots(call, in, open);
    for (int expert = threadIdx.x; in.cumulative != nullptr && expert < in.num_local; expert += kDispatchThreads) {
      in.cumulative[expert] += in.recv_count[expert];
    }
  }
  __syncthreads();
  end_receiving<Hop>(call, turn, !fine);
  if (call.sends) {
    end_sending(call, turn);
  }
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
