// The sending half of dispatch: a block takes a token, casts it once and stores it to the ranks of all its experts.
// Where a row goes is counted from the ids alone, so it is the same in every run.
#pragma once

#include <cuda_bf16.h>

#include "fp8/math.cuh"
#include "low_latency/device.cuh"

namespace moe_ep {

constexpr int kDispatchThreads = 512;
constexpr int kDispatchWarps = kDispatchThreads / 32;
constexpr int kMaxCachedKeys = 8192;
constexpr int kScaleElems = 128;

// Where the row of a slot goes: to its rank, or into the outbox for a far one; null for nowhere.
struct RowTarget {
  char* row;
  uint64_t* word;
};

struct SendShared {
  RowTarget targets[kMaxTopk];
  float scales[kMaxLowLatencyScales];
  int32_t mask[kMaxLowLatencyRanks];
  int32_t bad_slot;
};

__device__ inline int num_pairs_of(const LowLatencyDispatch& in) {
  return static_cast<int>(in.num_tokens) * in.shape.num_topk;
}

__device__ inline int64_t id_of(const LowLatencyDispatch& in, int pair) {
  return in.id_bytes == 8 ? static_cast<const int64_t*>(in.ids)[pair] : static_cast<const int32_t*>(in.ids)[pair];
}

// The place of an expert in one numbering of all local experts, rank by rank; kNoExpert for the id -1, kBadId for any
// other that is none.
constexpr int kNoExpert = -1, kBadId = -2;
__device__ inline int key_of_id(const LowLatencyDispatch& in, int64_t id) {
  const bool is_expert = 0 <= id && id < in.shape.num_experts;
  const int64_t expert = is_expert ? id : 0;
  const int key = in.owner[expert] * in.shape.most_local + in.local_idx[expert];
  return is_expert ? key : id == -1 ? kNoExpert : kBadId;
}
__device__ inline int key_of(const LowLatencyDispatch& in, int pair) { return key_of_id(in, id_of(in, pair)); }

// By threads `first`, `first + step` ...: keys of the first `count` pairs, whose loads are under way together.
__device__ inline void cache_keys(const LowLatencyDispatch& in, int count, int first, int step, int32_t* keys) {
  constexpr int kBatch = 4;
  for (int begin = first; begin < count; begin += kBatch * step) {
    int64_t ids[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = begin + i * step;
      ids[i] = pair < count ? id_of(in, pair) : kNoExpert;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = begin + i * step, key = key_of_id(in, ids[i]);
      if (pair < count) {
        keys[pair] = key;
      }
    }
  }
}

// The counting block finds out how many rows each expert gets, before it may tell anybody: first, by all threads, the
// counters are made ready.
__device__ inline void begin_counts(const LowLatencyDispatch& in, int num_keys, int32_t* counts, SendShared& shared) {
  for (int key = threadIdx.x; key < num_keys; key += kDispatchThreads) {
    counts[key] = 0;
  }
  if (threadIdx.x == 0) {
    shared.bad_slot = num_pairs_of(in);
  }
  __syncthreads();
}

// By threads `first`, `first + step` ..., which looked up the keys of the same pairs.
template <typename KeyAt>
__device__ inline void count_pairs(const LowLatencyDispatch& in, int first, int step, const KeyAt& key_at,
                                   int32_t* counts, SendShared& shared) {
  const int num_pairs = num_pairs_of(in);
  for (int pair = first; pair < num_pairs; pair += step) {
    const int key = key_at(pair);
    if (key >= 0) {
      atomicAdd(&counts[key], 1);
    } else if (key == kBadId) {
      atomicMin(&shared.bad_slot, pair);
    }
  }
}

// By a whole block that has counted: greets all ranks and tells them how many rows each of their experts gets.
template <typename Hop>
__device__ inline void send_counts(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyDispatch& in,
                                   int num_keys, const int32_t* counts, const SendShared& shared) {
  if (threadIdx.x < static_cast<unsigned int>(call.world.size)) {
    greet<Hop>(call, turn, threadIdx.x, shared.mask[threadIdx.x], call.print);
  }
  for (int key = threadIdx.x; key < num_keys; key += kDispatchThreads) {
    const int peer = key / in.shape.most_local, local = key % in.shape.most_local;
    if (shared.mask[peer] == kOpen) {
      uint64_t* word = words_of<Hop>(call, peer, turn.slot, call.world.rank) + local;
      bool is_put = false;
      if constexpr (Hop::kPuts) {
        is_put = is_far<Hop>(call, peer);
        if (is_put) {
          Hop::signal(word, word_of(turn, counts[key]), peer);
        }
      }
      if (!is_put) {
        store_relaxed(word, word_of(turn, counts[key]));
      }
    }
    if (counts[key] > in.shape.max_tokens) {
      report(call, kTooManyRows, key, counts[key], in.shape.max_tokens);
    }
  }
  const int num_pairs = num_pairs_of(in);
  HostRecord::Fault& fault = call.world.record->bad_idx;
  if (threadIdx.x == 0 && shared.bad_slot < num_pairs && load_acquire(&fault.valid) == 0) {
    const int64_t values[4] = {shared.bad_slot, id_of(in, shared.bad_slot), in.shape.num_topk, in.shape.num_experts};
    for (int i = 0; i < 4; ++i) {
      fault.values[i] = values[i];
    }
    store_release(&fault.valid, 1);
  }
}

// By a whole warp: where the row of `pair` goes. At its destination the rows of a source lie in the order of (local
// expert, pair), so its place is the number of pairs that come before it there.
template <typename Hop, typename KeyAt>
__device__ void aim(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyDispatch& in, int pair,
                    const KeyAt& key_at, SendShared& shared, RowTarget* target) {
  const int key = key_at(pair);
  const int num_pairs = num_pairs_of(in);
  const int peer = key < 0 ? 0 : key / in.shape.most_local;
  const int first_key = peer * in.shape.most_local;
  int num_smaller = 0, num_before = 0;
  if (key >= 0) {
    for (int other = lane_idx(); other < num_pairs; other += 32) {
      const int other_key = key_at(other);
      num_smaller += other_key >= first_key && other_key < key;
      num_before += other_key == key && other < pair;
    }
  }
  num_smaller = __reduce_add_sync(kFullWarp, num_smaller);
  num_before = __reduce_add_sync(kFullWarp, num_before);
  if (lane_idx() != 0) {
    return;
  }
  const bool goes = key >= 0 && shared.mask[peer] == kOpen;
  const bool fits = num_before < in.shape.max_tokens;
  in.slot_rank[pair] = !goes ? -1 : fits ? peer : kDropped;
  *target = {nullptr, nullptr};
  if (goes && fits) {
    const int row = num_smaller + num_before;
    *target = {rows_to<Hop>(call, peer, turn.slot) + static_cast<int64_t>(row) * in.shape.row_bytes,
               row_words(words_of<Hop>(call, peer, turn.slot, call.world.rank), in.shape) + row};
  }
}

__device__ inline uint4 cast_to_fp8(const uint4 (&raw)[2], bool power_of_two, float* scale) {
  float values[16];
  float amax = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t words[4] = {raw[half].x, raw[half].y, raw[half].z, raw[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[half * 8 + 2 * i] = __uint_as_float(words[i] << 16);
      values[half * 8 + 2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    amax = larger_finite(amax, values[i]);
  }
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {  // eight lanes share a scale
    amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
  }
  *scale = block_scale(amax, power_of_two);
  const float inverse = __frcp_rn(*scale);
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] = to_e4m3(values[4 * i], inverse) | to_e4m3(values[4 * i + 1], inverse) << 8 |
               to_e4m3(values[4 * i + 2], inverse) << 16 |
               static_cast<uint32_t>(to_e4m3(values[4 * i + 3], inverse)) << 24;
  }
  return make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

// The scale word `i` of a row: a float32, or four exponent bytes.
__device__ inline uint32_t scale_word(const float* scales, int i, int num_words, bool ue8m0) {
  if (i >= num_words) {
    return 0;
  }
  if (!ue8m0) {
    return __float_as_uint(scales[i]);
  }
  uint32_t word = 0;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    word |= (__float_as_uint(scales[4 * i + part]) >> 23) << (8 * part);
  }
  return word;
}

__device__ inline int num_scale_words(const LowLatencyDispatch& in) {
  const int num_scales = in.shape.hidden / kScaleElems;
  return in.format == LowLatencyFormat::kFp8Ue8m0 ? num_scales / 4 : num_scales;
}

// What of a row is written, a multiple of 16.
template <bool kFp8>
__device__ inline int sent_bytes(const LowLatencyDispatch& in) {
  return kFp8 ? in.shape.hidden + (num_scale_words(in) + 3) / 4 * kUnitBytes : in.shape.hidden * in.elem_bytes;
}

__device__ inline void store_to_all(const SendShared& shared, int num_topk, int unit, uint4 value) {
  for (int slot = 0; slot < num_topk; ++slot) {
    if (char* row = shared.targets[slot].row) {
      store_16(row + unit * kUnitBytes, value);
    }
  }
}

// A unit is what a thread stores at once. FP8: two reads of 16 bytes make one; otherwise a read is one, and a thread
// has two units.
struct Units {
  uint4 raw[2];
};

template <bool kFp8>
__device__ inline int num_units_of(const LowLatencyDispatch& in) {
  return in.shape.hidden * in.elem_bytes / (kFp8 ? 2 * kUnitBytes : kUnitBytes);
}

// By a whole block: this thread's part of a token's units from `first` on; zeros where there is none.
template <bool kFp8>
__device__ inline void load_units(const LowLatencyDispatch& in, int token, int first, Units& units) {
  const int row_bytes = in.shape.hidden * in.elem_bytes;
  const char* x = static_cast<const char*>(in.x) + static_cast<int64_t>(token) * row_bytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int unit = first + threadIdx.x + (kFp8 ? 0 : half * kDispatchThreads);
    const int at = (kFp8 ? 2 * unit + half : unit) * kUnitBytes;
    units.raw[half] = token < in.num_tokens && at < row_bytes ? load_16(x + at) : make_uint4(0, 0, 0, 0);
  }
}

// By a whole block: one token to all its experts. `units`: the first of them, on their way.
template <typename Hop, bool kFp8, typename KeyAt>
__device__ void send_token(const LowLatencyCall& call, const LowLatencyTurn& turn, const LowLatencyDispatch& in,
                           int token, const KeyAt& key_at, SendShared& shared, Units& units) {
  const int num_topk = in.shape.num_topk, num_units = num_units_of<kFp8>(in);
  for (int slot = warp_idx(); slot < num_topk; slot += kDispatchWarps) {
    aim<Hop>(call, turn, in, token * num_topk + slot, key_at, shared, &shared.targets[slot]);
  }
  __syncthreads();
  constexpr int kStep = kFp8 ? kDispatchThreads : 2 * kDispatchThreads;
  for (int first = 0; first < num_units; first += kStep) {
    if (first > 0) {
      load_units<kFp8>(in, token, first, units);
    }
    const int unit = first + threadIdx.x;
    if constexpr (kFp8) {
      float scale;
      const uint4 codes = cast_to_fp8(units.raw, in.format != LowLatencyFormat::kFp8, &scale);
      if (unit < num_units) {
        if (unit % 8 == 0) {
          shared.scales[unit / 8] = scale;
        }
        store_to_all(shared, num_topk, unit, codes);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (unit + half * kDispatchThreads < num_units) {
          store_to_all(shared, num_topk, unit + half * kDispatchThreads, units.raw[half]);
        }
      }
    }
  }
  __syncthreads();
  for (int slot = warp_idx(); slot < num_topk; slot += kDispatchWarps) {
    const RowTarget target = shared.targets[slot];
    if (target.row == nullptr) {
      continue;
    }
    if constexpr (kFp8) {
      const bool ue8m0 = in.format == LowLatencyFormat::kFp8Ue8m0;
      const int num_words = num_scale_words(in);
      for (int chunk = lane_idx(); 4 * chunk < num_words; chunk += 32) {
        store_16(target.row + in.shape.hidden + chunk * kUnitBytes,
                 make_uint4(scale_word(shared.scales, 4 * chunk, num_words, ue8m0),
                            scale_word(shared.scales, 4 * chunk + 1, num_words, ue8m0),
                            scale_word(shared.scales, 4 * chunk + 2, num_words, ue8m0),
                            scale_word(shared.scales, 4 * chunk + 3, num_words, ue8m0)));
      }
      __syncwarp();
    }
    if constexpr (Hop::kPuts) {
      const int peer = in.slot_rank[token * num_topk + slot];  // this warp has aimed it
      if (is_far<Hop>(call, peer)) {
        put_row<Hop>(call, turn, peer, target.row, sent_bytes<kFp8>(in), target.word,
                     word_of(turn, token * num_topk + slot));
        continue;
      }
    }
    if (lane_idx() == 0) {  // the block met behind its stores
      store_release(target.word, word_of(turn, token * num_topk + slot));
    }
  }
  __syncthreads();  // the targets are used again
}

}  // namespace moe_ep
