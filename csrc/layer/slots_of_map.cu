#include "common/check.h"
#include "common/device_limits.h"
#include "common/grid.h"
#include "common/warp_row.h"
#include "layer/slots_of_map.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ int64_t first_token() { return static_cast<int64_t>(blockIdx.x) * kWarps + warp_idx(); }
__device__ int64_t token_step() { return static_cast<int64_t>(gridDim.x) * kWarps; }

// A warp a token, 32 experts at a time.
__global__ void __launch_bounds__(kThreads)
    slots_of_map_kernel(const uint8_t* __restrict__ map, const float* __restrict__ probs, int64_t* __restrict__ idx,
                        float* __restrict__ weights, int64_t num_tokens, int num_experts, int num_slots) {
  const int lane = lane_idx();
  for (int64_t token = first_token(); token < num_tokens; token += token_step()) {
    const int64_t row = token * num_experts, out = token * num_slots;
    int num_found = 0;
    for (int first = 0; first < num_experts && num_found < num_slots; first += 32) {
      const int expert = first + lane;
      const bool is_chosen = expert < num_experts && map[row + expert] != 0;
      const unsigned int chosen = __ballot_sync(kFullWarp, is_chosen);
      const int slot = num_found + __popc(chosen & ((1u << lane) - 1));
      if (is_chosen && slot < num_slots) {
        idx[out + slot] = expert;
        weights[out + slot] = probs[row + expert];
      }
      num_found += __popc(chosen);
    }
    for (int slot = num_found + lane; slot < num_slots; slot += 32) {
      idx[out + slot] = -1;
      weights[out + slot] = 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    slots_of_map_backward_kernel(const int64_t* __restrict__ idx, const float* __restrict__ grad_weights,
                                 float* grad_probs, int64_t num_tokens, int num_experts, int num_slots) {
  const int lane = lane_idx();
  for (int64_t token = first_token(); token < num_tokens; token += token_step()) {
    const int64_t row = token * num_experts, in = token * num_slots;
    for (int expert = lane; expert < num_experts; expert += 32) {
      grad_probs[row + expert] = 0.0f;
    }
    __syncwarp();  // the zeros are written before what takes their place
    for (int slot = lane; slot < num_slots; slot += 32) {
      const int64_t expert = idx[in + slot];
      if (expert >= 0) {
        grad_probs[row + expert] = grad_weights[in + slot];
      }
    }
  }
}

void check_sizes(const char* what, int64_t num_tokens, int num_experts, int num_slots, int num_sms) {
  MOE_EP_CHECK(
      num_tokens >= 0 && num_experts >= 1 && num_slots >= 1 && num_sms >= 0, what, ": num_tokens is ", num_tokens,
      ", num_experts ", num_experts, ", num_slots ", num_slots, " and num_sms ", num_sms,
      ", but num_tokens and num_sms must be at least 0, the others at least 1: pass the sizes of the tensors.");
}

// Several blocks fit on an SM; a budget counts SMs, so it bounds the blocks.
unsigned int grid_for(int64_t num_tokens, int num_sms) {
  constexpr int kBlocksPerSm = 8;
  return grid_size(num_tokens, kWarps, num_sms == 0 ? kBlocksPerSm * device_sms() : num_sms);
}

}  // namespace

void launch_slots_of_map(const uint8_t* map, const float* probs, int64_t* idx, float* weights, int64_t num_tokens,
                         int num_experts, int num_slots, int num_sms, cudaStream_t stream) {
  check_sizes("slots_of_map", num_tokens, num_experts, num_slots, num_sms);
  if (num_tokens == 0) {
    return;
  }
  slots_of_map_kernel<<<grid_for(num_tokens, num_sms), kThreads, 0, stream>>>(map, probs, idx, weights, num_tokens,
                                                                              num_experts, num_slots);
  check_cuda(cudaGetLastError(), "slots_of_map: the launch");
}

void launch_slots_of_map_backward(const int64_t* idx, const float* grad_weights, float* grad_probs, int64_t num_tokens,
                                  int num_experts, int num_slots, int num_sms, cudaStream_t stream) {
  check_sizes("slots_of_map_backward", num_tokens, num_experts, num_slots, num_sms);
  if (num_tokens == 0) {
    return;
  }
  slots_of_map_backward_kernel<<<grid_for(num_tokens, num_sms), kThreads, 0, stream>>>(
      idx, grad_weights, grad_probs, num_tokens, num_experts, num_slots);
  check_cuda(cudaGetLastError(), "slots_of_map_backward: the launch");
}

}  // namespace moe_ep
