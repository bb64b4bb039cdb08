// Exact top-k of a row held by one warp, ties to the lowest index: the rules of moe_ep/layers/topk.py.
#pragma once

#include <climits>
#include <cstdint>

#include "common/warp_row.h"

namespace moe_ep {

constexpr int kMaskedKey = INT_MIN;  // below the key of -inf: loses against every score
constexpr int kNoIndex = INT_MAX;

// a < b holds for scores exactly where it holds for their keys; -0.0 and +0.0 have one key, every NaN has the largest.
__device__ inline int key_of(float score) {
  if (score != score) {
    return INT_MAX;
  }
  const int bits = __float_as_int(__fadd_rn(score, 0.0f));
  return bits < 0 ? bits ^ INT_MAX : bits;
}

__device__ inline float score_of(int key) {
  // INT_MAX is the bits of a NaN.
  return __int_as_float(key < 0 ? key ^ INT_MAX : key);
}

// Hands out the entries of a row of keys, best first. All lanes of the warp must call it.
template <int kPerLane>
class BestFirst {
 public:
  __device__ BestFirst(const int (&keys)[kPerLane], int num_elems, int lane) : keys_(keys), lane_(lane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      open_ |= (i * kWarp + lane < num_elems ? 1u : 0u) << i;
    }
    find_own_best();
  }

  // The index of the best entry that is left; there must be one.
  __device__ int take() {
    const int key = __reduce_max_sync(kFullWarp, best_key_);
    const int index = __reduce_min_sync(kFullWarp, best_key_ == key ? best_index_ : kNoIndex);
    if (index == best_index_) {
      open_ &= ~(1u << (index / kWarp));
      find_own_best();
    }
    return index;
  }

 private:
  __device__ void find_own_best() {
    best_key_ = kMaskedKey;
    best_index_ = kNoIndex;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool is_better = keys_[i] > best_key_ || best_index_ == kNoIndex;
      if ((open_ >> i & 1u) != 0 && is_better) {
        best_key_ = keys_[i];
        best_index_ = i * kWarp + lane_;
      }
    }
  }

  const int (&keys_)[kPerLane];
  int lane_;
  uint32_t open_ = 0;  // bit i: the lane's entry i has not been handed out
  int best_key_;
  int best_index_;
};

}  // namespace moe_ep
