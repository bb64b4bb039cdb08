#include "common/check.h"
#include "common/device_limits.h"
#include "common/grid.h"
#include "layer/route_scores.h"
#include "layer/topk.h"

namespace moe_ep {
namespace {

// The gradient of the chosen scores, from that of the weights: weights = scale * score / (sum of scores + eps), each
// step only where it is switched on, and score = softmax over the chosen where it is.
__device__ void chosen_scores_grad(const float* grad_weights_row, const Slots& scores, const RouteOptions& options,
                                   int lane, Slots& grad) {
  const float divisor = options.normalize ? row_sum(scores) + kNormalizeEps : 1.0f;
  Slots products;
#pragma unroll
  for (int j = 0; j < kSlotsPerLane; ++j) {
    const int slot = j * kWarp + lane;
    grad[j] = slot < options.num_topk ? grad_weights_row[slot] * options.scaling_factor : 0.0f;
    products[j] = grad[j] * (scores[j] / divisor);
  }
  if (options.normalize) {
    const float dot = row_sum(products);
#pragma unroll
    for (int j = 0; j < kSlotsPerLane; ++j) {
      grad[j] = (grad[j] - dot) / divisor;
    }
  }
  if (options.score_function == ScoreFunction::kSoftmaxOfChosen) {
#pragma unroll
    for (int j = 0; j < kSlotsPerLane; ++j) {
      products[j] = grad[j] * scores[j];
    }
    const float dot = row_sum(products);
#pragma unroll
    for (int j = 0; j < kSlotsPerLane; ++j) {
      grad[j] = scores[j] * (grad[j] - dot);
    }
  }
}

// From the gradient of every score, and of every probability, to that of the logits.
template <int kPerLane>
__device__ void logits_grad(const float (&logits)[kPerLane], const float (&grad_scores)[kPerLane],
                            const float (&grad_probs)[kPerLane], const SoftmaxStats& stats, int num_experts,
                            const RouteOptions& options, int lane, float (&grad)[kPerLane]) {
  float probs[kPerLane];
  float products[kPerLane];
  if (options.score_function == ScoreFunction::kSigmoid) {
    float scores[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = i * kWarp + lane < num_experts ? sigmoid(logits[i]) : 0.0f;
    }
    const float total = row_sum(scores) + kNormalizeEps;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      products[i] = grad_probs[i] * (scores[i] / total);
    }
    const float dot = row_sum(products);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float grad_score = grad_scores[i] + (grad_probs[i] - dot) / total;
      grad[i] = grad_score * (1.0f - scores[i]) * scores[i];
    }
    return;
  }
  const bool of_chosen = options.score_function == ScoreFunction::kSoftmaxOfChosen;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    probs[i] = stats.prob(logits[i]);
    products[i] = probs[i] * (of_chosen ? grad_probs[i] : grad_probs[i] + grad_scores[i]);
  }
  const float dot = row_sum(products);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    grad[i] = products[i] - probs[i] * dot + (of_chosen ? grad_scores[i] : 0.0f);
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kRouteThreads)
    topk_route_backward_kernel(const float* __restrict__ logits, const int64_t* __restrict__ topk_idx,
                               const float* __restrict__ grad_weights, const float* __restrict__ grad_probs,
                               int64_t probs_stride, float* __restrict__ grad_logits, int64_t num_tokens,
                               int num_experts, RouteOptions options) {
  extern __shared__ float spread[];  // [warps of the block, E]: the chosen scores' gradients at their experts
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int num_topk = options.num_topk;
  float* own = spread + warp * num_experts;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRouteWarps;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kRouteWarps + warp; token < num_tokens; token += stride) {
    const float* logits_row = logits + token * num_experts;
    float values[kPerLane];
    float grad_scores[kPerLane] = {};
    float row_grad_probs[kPerLane] = {};
    float grad[kPerLane] = {};
    if (topk_idx[token * num_topk] >= 0) {
      load_row(logits_row, num_experts, lane, -INFINITY, values);
      const bool of_all = options.score_function == ScoreFunction::kSoftmax;
      const bool of_chosen = options.score_function == ScoreFunction::kSoftmaxOfChosen;
      const bool needs_probs = of_all || (of_chosen && grad_probs != nullptr);
      const SoftmaxStats stats = needs_probs ? softmax_stats(values) : SoftmaxStats{0.0f, 1.0f};
      if (grad_probs != nullptr) {
        load_row(grad_probs + token * probs_stride, num_experts, lane, 0.0f, row_grad_probs);
      }
      if (grad_weights != nullptr) {
        int chosen[kSlotsPerLane];
        Slots scores;
        Slots slot_grad;
        for (int expert = lane; expert < num_experts; expert += kWarp) {
          own[expert] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kSlotsPerLane; ++j) {
          const int slot = j * kWarp + lane;
          chosen[j] = slot < num_topk ? static_cast<int>(topk_idx[token * num_topk + slot]) : 0;
        }
        chosen_scores(logits_row, chosen, stats, options, lane, scores);
        chosen_scores_grad(grad_weights + token * num_topk, scores, options, lane, slot_grad);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kSlotsPerLane; ++j) {
          if (j * kWarp + lane < num_topk) {
            own[chosen[j]] = slot_grad[j];
          }
        }
        __syncwarp();
        load_row(own, num_experts, lane, 0.0f, grad_scores);
        __syncwarp();
      }
      if (of_chosen && !needs_probs) {
        copy_row(grad_scores, grad);
      } else {
        logits_grad(values, grad_scores, row_grad_probs, stats, num_experts, options, lane, grad);
      }
    }
    store_row(grad_logits + token * num_experts, num_experts, lane, grad);
  }
}

}  // namespace

void launch_topk_route_backward(const float* logits, const int64_t* topk_idx, const float* grad_weights,
                                const float* grad_probs, int64_t probs_stride, float* grad_logits, int64_t num_tokens,
                                int num_experts, const RouteOptions& options, int num_sms, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 8;
  check_route_sizes("topk_route_backward", num_tokens, num_experts, options, num_sms);
  if (num_tokens == 0) {
    return;
  }
  const size_t shared_bytes = static_cast<size_t>(kRouteWarps) * num_experts * sizeof(float);
  const int max_blocks = num_sms > 0 ? num_sms : kBlocksPerSm * device_sms();
  with_experts_per_lane(num_experts, [&](auto per_lane) {
    topk_route_backward_kernel<per_lane.value>
        <<<grid_size(num_tokens, kRouteWarps, max_blocks), kRouteThreads, shared_bytes, stream>>>(
            logits, topk_idx, grad_weights, grad_probs, probs_stride, grad_logits, num_tokens, num_experts, options);
  });
  check_cuda(cudaGetLastError(), "topk_route_backward: the launch");
}

}  // namespace moe_ep
