// From a map of which experts a token has to a list of them. T tokens, E experts, K slots a token.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moe_ep {

// Lists the experts of each token in ascending order, with their probabilities.
//
//   map      in   [T, E] bool (one byte), contiguous; of a row with more than K experts the first K are taken
//   probs    in   [T, E] float32, contiguous
//   idx      out  [T, K] int64, -1 in the slots that are left
//   weights  out  [T, K] float32, 0 in those
//   num_sms  at most this many SMs are used; 0 = the whole device
//   stream   a cudaStream_t of the device that is current and owns every pointer
//
// With E = 4, K = 3, map = [[0, 1, 0, 1]] and probs = [[.1, .2, .3, .4]]: idx = [[1, 3, -1]], weights = [[.2, .4, 0]].
//
// Ownership: the caller allocates and keeps everything alive until the work on `stream` is done; no output needs to be
// zeroed before. Does not wait for the device. Throws std::runtime_error where a size is out of range or a launch
// fails.
void launch_slots_of_map(const uint8_t* map, const float* probs, int64_t* idx, float* weights, int64_t num_tokens,
                         int num_experts, int num_slots, int num_sms, cudaStream_t stream);

// The gradient of its weights.
//
//   idx           in   [T, K] int64, the forward's
//   grad_weights  in   [T, K] float32, contiguous
//   grad_probs    out  [T, E] float32, zero where the token has no expert
void launch_slots_of_map_backward(const int64_t* idx, const float* grad_weights, float* grad_probs, int64_t num_tokens,
                                  int num_experts, int num_slots, int num_sms, cudaStream_t stream);

}  // namespace moe_ep
