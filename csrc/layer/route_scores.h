// What the router's forward and backward kernels both compute: the scores of a token's chosen experts.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/warp_row.h"
#include "layer/topk.h"

namespace moe_ep {

constexpr int kRouteThreads = 256;
constexpr int kRouteWarps = kRouteThreads / kWarp;
constexpr int kSlotsPerLane = kMaxRouteTopk / kWarp;
constexpr float kNormalizeEps = 1e-20f;

__device__ inline float sigmoid(float logit) { return 1.0f / (1.0f + expf(-logit)); }

// A value for each of the lane's slots: slot j * 32 + lane is slots[j].
using Slots = float[kSlotsPerLane];

// The scores of the chosen experts, 0 in slots behind K, after the softmax over the chosen where it is asked for.
__device__ inline void chosen_scores(const float* logits, const int (&chosen)[kSlotsPerLane], const SoftmaxStats& stats,
                                     const RouteOptions& options, int lane, Slots& scores) {
  Slots values;
#pragma unroll
  for (int j = 0; j < kSlotsPerLane; ++j) {
    values[j] = j * kWarp + lane < options.num_topk ? logits[chosen[j]] : -INFINITY;
  }
  const bool of_chosen = options.score_function == ScoreFunction::kSoftmaxOfChosen;
  const SoftmaxStats over = of_chosen ? softmax_stats(values) : stats;
#pragma unroll
  for (int j = 0; j < kSlotsPerLane; ++j) {
    const bool is_used = j * kWarp + lane < options.num_topk;
    const float score = options.score_function == ScoreFunction::kSigmoid ? sigmoid(values[j]) : over.prob(values[j]);
    scores[j] = is_used ? score : 0.0f;
  }
}

// Throws where the sizes are none that the kernels serve. `what` is the name of the operation.
void check_route_sizes(const char* what, int64_t num_tokens, int num_experts, const RouteOptions& options, int num_sms);

// Calls launch(kPerLane) with the kernel's compile-time number of experts a lane, as a std::integral_constant.
template <typename Launch>
void with_experts_per_lane(int num_experts, const Launch& launch) {
  if (num_experts <= 1 * kWarp) {
    launch(std::integral_constant<int, 1>());
  } else if (num_experts <= 2 * kWarp) {
    launch(std::integral_constant<int, 2>());
  } else if (num_experts <= 4 * kWarp) {
    launch(std::integral_constant<int, 4>());
  } else if (num_experts <= 8 * kWarp) {
    launch(std::integral_constant<int, 8>());
  } else if (num_experts <= 16 * kWarp) {
    launch(std::integral_constant<int, 16>());
  } else {
    launch(std::integral_constant<int, 32>());
  }
}

}  // namespace moe_ep
