// The router's choice of experts, from logits to weights. T tokens, E experts, K experts a token, G groups.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moe_ep {

// What experts are chosen by, and what weights are made of.
enum class ScoreFunction {
  kSoftmax,          // softmax over all experts, for both
  kSoftmaxOfChosen,  // chosen by the logits; weights are the softmax over the K chosen
  kSigmoid,          // the sigmoid of each logit, for both
};

struct RouteOptions {
  ScoreFunction score_function;
  int num_topk;          // K
  int num_groups;        // G, divides E; 0 = no groups
  int group_topk;        // groups kept a token
  int num_best;          // a group's score is the sum of its so many best scores
  bool normalize;        // weights are divided by their sum + 1e-20
  float scaling_factor;  // weights are multiplied by it, last
};

inline constexpr int kMaxRouteExperts = 1024;
inline constexpr int kMaxRouteTopk = 64;

// Chooses K experts a token, by the rules of moe_ep/layers/topk.py: best first, equal scores by the lowest index, -0.0
// equals +0.0, NaN counts as the largest, an expert of a group that was not kept loses against every other one.
//
//   logits        in   [T, E] float32, contiguous
//   expert_bias   in   [E] float32, added to the scores for choosing only; null = none
//   padding_mask  in   [T] bool (one byte), nonzero = padding: ids -1, weights, probabilities 0; null = no padding
//   topk_idx      out  [T, K] int64, distinct in a row
//   topk_weights  out  [T, K] float32, from the unbiased scores
//   probs         out  [T, E] float32, scores whose rows sum to 1 (softmax; sigmoid over its sum + 1e-20); null = not
//                      wanted
//   counts        out  [E] int64, pairs (token, slot) of each expert
//   num_sms       at most this many SMs are used; 0 = the whole device
//   stream        a cudaStream_t of the device that is current and owns every pointer
//
// Softmax and sums run in the order of PyTorch's own softmax for rows of at most 1024 (lane by lane, then a butterfly),
// so that scores, and with them ids, have the bits of the reference on the same device.
//
// Ownership: the caller allocates and keeps everything alive until the work on `stream` is done; no output needs to be
// zeroed before. The same input gives the same bits (counts are integers). Does not wait for the device.
// Throws std::runtime_error where a size is out of range (1 <= K <= min(E, 64), E <= 1024) or a launch fails.
void launch_topk_route(const float* logits, const float* expert_bias, const uint8_t* padding_mask, int64_t* topk_idx,
                       float* topk_weights, float* probs, int64_t* counts, int64_t num_tokens, int num_experts,
                       const RouteOptions& options, int num_sms, cudaStream_t stream);

// The gradient of launch_topk_route: what autograd gives for the same formula. Ids, counts and bias have none.
//
//   logits         in   [T, E] float32, as in the forward
//   topk_idx       in   [T, K] int64, the forward's; a row that begins with -1 (padding) gets zeros
//   grad_weights   in   [T, K] float32, contiguous; null = zeros
//   grad_probs     in   [T, E] float32, neighbouring elements adjacent; null = zeros
//   probs_stride   elements from one row of grad_probs to the next; 0 = one row for every token
//   grad_logits    out  [T, E] float32, contiguous, written whole
//
// The rest as above; num_best, groups and bias are not looked at.
void launch_topk_route_backward(const float* logits, const int64_t* topk_idx, const float* grad_weights,
                                const float* grad_probs, int64_t probs_stride, float* grad_logits, int64_t num_tokens,
                                int num_experts, const RouteOptions& options, int num_sms, cudaStream_t stream);

}  // namespace moe_ep
