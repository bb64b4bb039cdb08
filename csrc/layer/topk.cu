#include <climits>

#include "common/check.h"
#include "common/device_limits.h"
#include "common/grid.h"
#include "common/shared_memory.h"
#include "layer/best_first.h"
#include "layer/route_scores.h"
#include "layer/topk.h"

namespace moe_ep {
namespace {

// A group's keys lie side by side in shared memory and each lane walks through one group: with an odd distance between
// groups the lanes meet in no bank.
__device__ __host__ int group_stride(int group_size) { return group_size | 1; }

// The sum of the `num_best` largest scores of a group, added one by one, largest first.
__device__ float group_score(const int* keys, int group_size, int num_best) {
  int left = num_best < group_size ? num_best : group_size;
  int below = INT_MAX;
  bool is_first = true;  // nothing lies above INT_MAX, so the first round takes it in
  float total = 0.0f;
  while (left > 0) {
    int largest = kMaskedKey;
    int times = 0;
    for (int i = 0; i < group_size; ++i) {
      const int key = keys[i];
      if (is_first || key < below) {
        times = key > largest ? 1 : times + (key == largest ? 1 : 0);
        largest = key > largest ? key : largest;
      }
    }
    const float score = score_of(largest);
    for (int i = 0; i < times && left > 0; ++i, --left) {
      total = is_first && i == 0 ? score : __fadd_rn(total, score);
    }
    below = largest;
    is_first = false;
  }
  return total;
}

// Gives the experts outside the token's best groups the key that loses. `scratch` is the warp's own.
template <int kPerLane>
__device__ void mask_groups(int (&keys)[kPerLane], int* scratch, int num_experts, const RouteOptions& options,
                            int lane) {
  const int group_size = num_experts / options.num_groups;
  const int stride = group_stride(group_size);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    if (expert < num_experts) {
      scratch[expert / group_size * stride + expert % group_size] = keys[i];
    }
  }
  __syncwarp();
  int group_keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int group = i * kWarp + lane;
    group_keys[i] = group < options.num_groups
                        ? key_of(group_score(scratch + group * stride, group_size, options.num_best))
                        : kMaskedKey;
  }
  __syncwarp();
  for (int group = lane; group < options.num_groups; group += kWarp) {
    scratch[group] = 0;
  }
  __syncwarp();
  BestFirst<kPerLane> groups(group_keys, options.num_groups, lane);
  for (int n = 0; n < options.group_topk; ++n) {
    const int group = groups.take();
    if (lane == 0) {
      scratch[group] = 1;
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    if (expert < num_experts && scratch[expert / group_size] == 0) {
      keys[i] = kMaskedKey;
    }
  }
  __syncwarp();
}

// The scores that experts are chosen by, bias not yet in. Probabilities go to probs_row unless it is null.
template <int kPerLane>
__device__ SoftmaxStats choice_scores(const float (&logits)[kPerLane], float* probs_row, int num_experts,
                                      const RouteOptions& options, int lane, float (&scores)[kPerLane]) {
  const ScoreFunction function = options.score_function;
  SoftmaxStats stats = {0.0f, 1.0f};
  float probs[kPerLane];
  if (function == ScoreFunction::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = i * kWarp + lane < num_experts ? sigmoid(logits[i]) : 0.0f;
    }
    const float total = probs_row != nullptr ? row_sum(scores) + kNormalizeEps : 1.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      probs[i] = scores[i] / total;
    }
  } else {
    const bool of_chosen = function == ScoreFunction::kSoftmaxOfChosen;
    if (!of_chosen || probs_row != nullptr) {
      stats = softmax_stats(logits);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      probs[i] = stats.prob(logits[i]);
      scores[i] = of_chosen ? logits[i] : probs[i];
    }
  }
  if (probs_row != nullptr) {
    store_row(probs_row, num_experts, lane, probs);
  }
  return stats;
}

// One token by one warp.
template <int kPerLane>
__device__ void route_token(const float* logits_row, const float* expert_bias, int64_t* idx_row, float* weights_row,
                            float* probs_row, int* scratch, int* block_counts, int num_experts,
                            const RouteOptions& options, int lane) {
  float logits[kPerLane];
  float scores[kPerLane];
  int keys[kPerLane];
  load_row(logits_row, num_experts, lane, -INFINITY, logits);
  const SoftmaxStats stats = choice_scores(logits, probs_row, num_experts, options, lane, scores);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    const bool has_bias = expert_bias != nullptr && expert < num_experts;
    keys[i] = key_of(has_bias ? __fadd_rn(scores[i], expert_bias[expert]) : scores[i]);
  }
  if (options.num_groups > 0) {
    mask_groups(keys, scratch, num_experts, options, lane);
  }
  BestFirst<kPerLane> experts(keys, num_experts, lane);
  int chosen[kSlotsPerLane] = {};
  for (int slot = 0; slot < options.num_topk; ++slot) {
    const int expert = experts.take();
#pragma unroll
    for (int j = 0; j < kSlotsPerLane; ++j) {
      chosen[j] = slot == j * kWarp + lane ? expert : chosen[j];
    }
  }
  Slots weights;
  chosen_scores(logits_row, chosen, stats, options, lane, weights);
  const float divisor = options.normalize ? row_sum(weights) + kNormalizeEps : 1.0f;
#pragma unroll
  for (int j = 0; j < kSlotsPerLane; ++j) {
    const int slot = j * kWarp + lane;
    if (slot < options.num_topk) {
      idx_row[slot] = chosen[j];
      weights_row[slot] = weights[j] / divisor * options.scaling_factor;
      atomicAdd(&block_counts[chosen[j]], 1);
    }
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kRouteThreads)
    topk_route_kernel(const float* __restrict__ logits, const float* __restrict__ expert_bias,
                      const uint8_t* __restrict__ padding_mask, int64_t* __restrict__ topk_idx,
                      float* __restrict__ topk_weights, float* __restrict__ probs, unsigned long long* counts,
                      int64_t num_tokens, int num_experts, RouteOptions options) {
  extern __shared__ int shared[];  // [E] counts of this block, then each warp's scratch
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int scratch_size =
      options.num_groups > 0 ? options.num_groups * group_stride(num_experts / options.num_groups) : 0;
  int* scratch = shared + num_experts + warp * scratch_size;
  for (int expert = threadIdx.x; expert < num_experts; expert += kRouteThreads) {
    shared[expert] = 0;
  }
  __syncthreads();
  const int num_topk = options.num_topk;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRouteWarps;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kRouteWarps + warp; token < num_tokens; token += stride) {
    float* probs_row = probs == nullptr ? nullptr : probs + token * num_experts;
    if (padding_mask != nullptr && padding_mask[token] != 0) {
      for (int slot = lane; slot < num_topk; slot += kWarp) {
        topk_idx[token * num_topk + slot] = -1;
        topk_weights[token * num_topk + slot] = 0.0f;
      }
      for (int expert = lane; probs_row != nullptr && expert < num_experts; expert += kWarp) {
        probs_row[expert] = 0.0f;
      }
      continue;
    }
    route_token<kPerLane>(logits + token * num_experts, expert_bias, topk_idx + token * num_topk,
                          topk_weights + token * num_topk, probs_row, scratch, shared, num_experts, options, lane);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < num_experts; expert += kRouteThreads) {
    if (shared[expert] != 0) {
      atomicAdd(&counts[expert], static_cast<unsigned long long>(shared[expert]));
    }
  }
}

}  // namespace

void check_route_sizes(const char* what, int64_t num_tokens, int num_experts, const RouteOptions& options,
                       int num_sms) {
  MOE_EP_CHECK(num_tokens >= 0 && num_experts >= 1 && num_experts <= kMaxRouteExperts, what, ": logits are [",
               num_tokens, ", ", num_experts, "], but at least [0, 1] and at most ", kMaxRouteExperts,
               " experts are served: take the PyTorch path for more.");
  MOE_EP_CHECK(options.num_topk >= 1 && options.num_topk <= kMaxRouteTopk && options.num_topk <= num_experts, what,
               ": topk is ", options.num_topk, ", but 1 to ", kMaxRouteTopk, " of the ", num_experts,
               " experts can be chosen: correct topk.");
  MOE_EP_CHECK(num_sms >= 0, what, ": num_sms is ", num_sms, ", but the least is 0 (all): give the SM budget.");
}

void launch_topk_route(const float* logits, const float* expert_bias, const uint8_t* padding_mask, int64_t* topk_idx,
                       float* topk_weights, float* probs, int64_t* counts, int64_t num_tokens, int num_experts,
                       const RouteOptions& options, int num_sms, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 4;  // on the whole device; more would only add to the counts of a block that are flushed
  check_route_sizes("topk_route", num_tokens, num_experts, options, num_sms);
  const int num_groups = options.num_groups;
  MOE_EP_CHECK(num_groups >= 0 && (num_groups == 0 || num_experts % num_groups == 0), "topk_route: num_groups is ",
               num_groups, ", but must be 0 (none) or divide the ", num_experts, " experts: correct num_groups.");
  MOE_EP_CHECK(
      num_groups == 0 || (options.group_topk >= 1 && options.group_topk <= num_groups && options.num_best >= 1),
      "topk_route: group_topk is ", options.group_topk, " and num_best is ", options.num_best, " with ", num_groups,
      " groups, but 1 to ", num_groups, " groups are kept, by at least 1 score: correct them.");
  check_cuda(cudaMemsetAsync(counts, 0, num_experts * sizeof(int64_t), stream), "topk_route: zeroing the counts");
  if (num_tokens == 0) {
    return;
  }
  const int scratch_size = num_groups > 0 ? num_groups * group_stride(num_experts / num_groups) : 0;
  const size_t shared_bytes = (num_experts + kRouteWarps * scratch_size) * sizeof(int);
  const int max_blocks = num_sms > 0 ? num_sms : kBlocksPerSm * device_sms();
  with_experts_per_lane(num_experts, [&](auto per_lane) {
    constexpr auto kernel = topk_route_kernel<per_lane.value>;
    allow_shared_memory<kernel>(static_cast<int>(shared_bytes), "topk_route: the shared memory");
    kernel<<<grid_size(num_tokens, kRouteWarps, max_blocks), kRouteThreads, shared_bytes, stream>>>(
        logits, expert_bias, padding_mask, topk_idx, topk_weights, probs, reinterpret_cast<unsigned long long*>(counts),
        num_tokens, num_experts, options);
  });
  check_cuda(cudaGetLastError(), "topk_route: the launch");
}

}  // namespace moe_ep
