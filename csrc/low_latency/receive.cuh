// The receiving half of dispatch: packs what came by (local expert, source, pair), and says where everything lies.
#pragma once

#include "low_latency/send.cuh"

namespace moe_ep {

// What a block knows of all rows, in shared memory; n = L * W.
struct ReceiveShared {
  int32_t* counts;  // [W, L] rows of each expert from each source
  int32_t* bases;   // [W, L] the first of them among the rows of the source
  int32_t* begins;  // [L * W + 1] the first row handed out of each (expert, source); the last entry is R
};

__device__ inline int rows_of_expert(const ReceiveShared& shared, int size, int expert) {
  return shared.begins[(expert + 1) * size] - shared.begins[expert * size];
}

// The word with the count number `i`, by (source, local expert).
__device__ inline const uint64_t* count_word(const LowLatencyCall& call, const LowLatencyTurn& turn, int num_local,
                                             int i) {
  return words_of(call, call.world.rank, turn.slot, i / num_local) + i % num_local;
}

// By a whole block: the counts of all sources, and their sums. `seen`: a first look at count number `threadIdx.x`.
template <typename Hop>
__device__ inline void count_rows(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyDispatch& in,
                                  const bool (&open)[kMaxLowLatencyRanks], const ReceiveShared& shared, uint64_t seen) {
  const int size = call.world.size, num_local = in.num_local, most = in.shape.max_tokens;
  for (int i = threadIdx.x; i < size * num_local; i += kDispatchThreads) {
    const int source = i / num_local;
    if (i == static_cast<int>(threadIdx.x) && open[source] && same_call(seen, word_of(turn, 0))) {
      shared.counts[i] = value_of(seen);
      continue;
    }
    const uint64_t* word = count_word(call, turn, num_local, i);
    shared.counts[i] = open[source] ? wait_value<Hop>(call, turn, source, kWaitHeader, word, 0) : 0;
  }
  __syncthreads();
  for (int task = warp_idx(); task <= size; task += kDispatchWarps) {
    const int length = task < size ? num_local : num_local * size;
    int before = 0, total = 0;
    for (int first = 0; first < length; first += 32) {
      const int i = first + lane_idx();
      const bool inside = i < length;
      const int count =
          !inside ? 0 : shared.counts[task < size ? task * num_local + i : i % size * num_local + i / size];
      const int sum = before + exclusive_scan(task < size ? count : min(count, most), &total);
      if (inside) {
        (task < size ? shared.bases + task * num_local : shared.begins)[i] = sum;
      }
      before += total;
    }
    if (task == size && lane_idx() == 0) {
      shared.begins[length] = before;
    }
  }
  __syncthreads();
}

// By a whole warp: waits for one row and writes it to its place.
template <typename Hop, bool kFp8>
__device__ void receive_row(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyDispatch& in,
                            const ReceiveShared& shared, int row, uint64_t began) {
  const int size = call.world.size, num_places = size * in.shape.max_tokens;
  int low = 0, high = in.num_local * size;  // the last (expert, source) that begins at or before this row
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (shared.begins[middle] <= row ? low : high) = middle;
  }
  const int expert = low / size, source = low % size;
  const int sent_row = shared.bases[source * in.num_local + expert] + row - shared.begins[low];
  const int place = row - shared.begins[expert * size];
  const uint64_t* word = row_words(words_of(call, call.world.rank, turn.slot, source), in.shape) + sent_row;
  uint32_t pair = 0;
  if (lane_idx() == 0) {
    pair = wait_value<Hop>(call, turn, source, kWaitFlag, word, kMaxPairs);
    charge_wait(call, turn, source, began);
  }
  __syncwarp();  // a shuffle orders no memory, and all lanes read the row
  pair = __shfl_sync(kFullWarp, pair, 0);
  if (pair == kMaxPairs) {  // lost: all is made anew, or nothing stands
    return;
  }
  const int pairs_a_source = in.shape.max_tokens * in.shape.num_topk;
  const char* from =
      rows_of(call, call.world.rank, turn.slot, source) + static_cast<int64_t>(sent_row) * in.shape.row_bytes;
  const int row_bytes = in.shape.hidden * (kFp8 ? 1 : in.elem_bytes);
  const int64_t flat = static_cast<int64_t>(expert) * num_places + place;
  copy_units<7>(in.rows + flat * row_bytes, from, row_bytes / kUnitBytes);
  if constexpr (kFp8) {
    const int num_words = num_scale_words(in);
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(from + in.shape.hidden);
    uint32_t* out = static_cast<uint32_t*>(in.scales) + static_cast<int64_t>(expert) * num_words * num_places + place;
    for (int i = lane_idx(); i < num_words; i += 32) {
      out[static_cast<int64_t>(i) * num_places] = scales[i];
    }
  }
  if (lane_idx() == 0) {
    in.src_info[flat] = static_cast<int32_t>(pair) / in.shape.num_topk;
    in.row_places[2 * (1 + row)] = static_cast<int32_t>(flat);
    in.row_places[2 * (1 + row) + 1] = source * pairs_a_source + static_cast<int32_t>(pair);
  }
}

// By a whole block, the `block`-th of `num_blocks` that share the work; `open` says from whom rows came. False where
// the call is given up.
template <typename Hop, bool kFp8>
__device__ bool receive_rows(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyDispatch& in,
                             const ReceiveShared& shared, int block, int num_blocks,
                             bool (&open)[kMaxLowLatencyRanks]) {
  const uint64_t began = now_ns();
  const int size = call.world.size, num_local = in.num_local;
  // Under way beside the greetings; a count stands for nothing but its own value.
  const bool looks = static_cast<int>(threadIdx.x) < size * num_local;
  const uint64_t seen = looks ? load_relaxed(count_word(call, turn, num_local, threadIdx.x)) : 0;
  if (!begin_receiving<Hop>(call, turn, block == 0, open)) {
    return false;
  }
  count_rows<Hop>(call, turn, in, open, shared, seen);
  const int num_places = size * in.shape.max_tokens, num_rows = shared.begins[num_local * size];
  for (int row = warp_idx() * num_blocks + block; row < num_rows; row += num_blocks * kDispatchWarps) {
    receive_row<Hop, kFp8>(call, turn, in, shared, row, began);
  }
  const int num_all = num_local * num_places;
  for (int i = block * kDispatchThreads + threadIdx.x; i < num_all; i += num_blocks * kDispatchThreads) {
    const int expert = i / num_places;
    if (i % num_places >= rows_of_expert(shared, size, expert)) {
      in.src_info[i] = -1;
    }
  }
  if (block == 0) {
    for (int i = threadIdx.x; i < num_local * size; i += kDispatchThreads) {
      const int first = shared.begins[i / size * size];
      in.layout_range[i] = static_cast<int64_t>(shared.begins[i] - first) << 32 |
                           static_cast<int64_t>(shared.begins[i + 1] - shared.begins[i]);
    }
    for (int expert = threadIdx.x; expert < num_local; expert += kDispatchThreads) {
      in.recv_count[expert] = rows_of_expert(shared, size, expert);
    }
    if (threadIdx.x == 0) {
      in.row_places[0] = num_rows;
    }
  }
  __syncthreads();
  return true;
}

// By the last block: the slots of ranks that have masked this one, or were lost, are unused, as those that it masked.
__device__ inline void close_slots(const LowLatencyCall& call, const LowLatencyDispatch& in,
                                   const bool (&open)[kMaxLowLatencyRanks]) {
  bool all_open = true;
  for (int peer = 0; peer < call.world.size; ++peer) {
    all_open &= open[peer];
  }
  if (all_open) {
    return;
  }
  for (int pair = threadIdx.x; pair < in.num_tokens * in.shape.num_topk; pair += kDispatchThreads) {
    const int32_t peer = in.slot_rank[pair];
    if (peer >= 0 && !open[peer]) {
      in.slot_rank[pair] = -1;
    }
  }
}

// By a whole block: the results of a call that is given up. The sums of its tokens will be NaN.
__device__ inline void receive_nothing(const LowLatencyCall& call, const LowLatencyDispatch& in) {
  const int num_places = call.world.size * in.shape.max_tokens;
  for (int i = threadIdx.x; i < in.num_local * num_places; i += kDispatchThreads) {
    in.src_info[i] = -1;
  }
  for (int i = threadIdx.x; i < in.num_local * call.world.size; i += kDispatchThreads) {
    in.layout_range[i] = 0;
  }
  for (int expert = threadIdx.x; expert < in.num_local; expert += kDispatchThreads) {
    in.recv_count[expert] = 0;
  }
  // After a failure nothing may have been sent, nor said of the slots.
  const bool was_sent = !has_failed(call);
  for (int pair = threadIdx.x; pair < in.num_tokens * in.shape.num_topk; pair += kDispatchThreads) {
    const bool goes_nowhere = was_sent ? in.slot_rank[pair] == -1 : key_of(in, pair) < 0;
    in.slot_rank[pair] = goes_nowhere ? -1 : kDropped;
  }
  if (threadIdx.x == 0) {
    in.row_places[0] = 0;
  }
}

}  // namespace moe_ep
