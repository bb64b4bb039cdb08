#include <climits>

#include "common/check.h"
#include "common/grid.h"
#include "common/warp.cuh"
#include "layer/layout_count.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 256;
// "Nothing found yet", and the greatest unsigned value: atomicMin keeps the first position in reading order.
constexpr int64_t kNone = -1;

// Adds 1 to counters[key] for every lane with key >= 0. All lanes of the warp must call it. Lanes with the same key
// share one atomic: with skewed routing all 32 name the same expert, and 32 atomics on one address would take turns.
__device__ void count_by_warp(int32_t* counters, int key) {
  const unsigned int same_key = __match_any_sync(kFullWarp, key);
  const int lane = lane_idx();
  if (key >= 0 && lane == __ffs(same_key) - 1) {
    atomicAdd(&counters[key], __popc(same_key));
  }
}

// One thread per token, whole warps for as long as any lane has a token.
template <typename Idx>
__global__ void __launch_bounds__(kThreads)
    layout_count_kernel(const Idx* __restrict__ topk_idx, const int32_t* __restrict__ rank_of_expert,
                        int32_t* tokens_per_expert, int32_t* tokens_per_rank, uint8_t* is_token_in_rank,
                        unsigned long long* first_bad, int64_t num_tokens, int64_t num_topk, int64_t num_experts,
                        int64_t num_ranks) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t num_rounded = (num_tokens + 31) / 32 * 32;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; token < num_rounded;
       token += stride) {
    for (int64_t slot = 0; slot < num_topk; ++slot) {
      int expert = -1;
      int rank = -1;
      if (token < num_tokens) {
        // Compared in 64 bits: 2^32 + 3 must not narrow to expert 3.
        const int64_t id = topk_idx[token * num_topk + slot];
        if (id >= 0 && id < num_experts) {
          expert = static_cast<int>(id);
          // No other thread touches this row, so it doubles as the set of ranks that the token has counted for.
          uint8_t* in_rank = &is_token_in_rank[token * num_ranks + rank_of_expert[expert]];
          rank = *in_rank ? -1 : rank_of_expert[expert];
          *in_rank = 1;
        } else if (id != -1) {
          atomicMin(first_bad, static_cast<unsigned long long>(token * num_topk + slot));
        }
      }
      count_by_warp(tokens_per_expert, expert);
      count_by_warp(tokens_per_rank, rank);
    }
  }
}

// Turns the position in bad_id[0] into token, slot and id. A launch of its own, because the position is final only
// when every block has run.
template <typename Idx>
__global__ void describe_bad_id_kernel(const Idx* topk_idx, int64_t* bad_id, int64_t num_topk) {
  const int64_t position = bad_id[0];
  if (position != kNone) {
    bad_id[0] = position / num_topk;
    bad_id[1] = position % num_topk;
    bad_id[2] = topk_idx[position];
  }
}

template <typename Idx>
void launch(const void* topk_idx, const int32_t* rank_of_expert, int32_t* tokens_per_expert, int32_t* tokens_per_rank,
            uint8_t* is_token_in_rank, int64_t* bad_id, int64_t num_tokens, int64_t num_topk, int64_t num_experts,
            int64_t num_ranks, int num_sms, cudaStream_t stream) {
  const Idx* idx = static_cast<const Idx*>(topk_idx);
  layout_count_kernel<Idx><<<grid_size(num_tokens, kThreads, num_sms), kThreads, 0, stream>>>(
      idx, rank_of_expert, tokens_per_expert, tokens_per_rank, is_token_in_rank,
      reinterpret_cast<unsigned long long*>(bad_id), num_tokens, num_topk, num_experts, num_ranks);
  check_cuda(cudaGetLastError(), "layout_count: the launch of the count");
  describe_bad_id_kernel<Idx><<<1, 1, 0, stream>>>(idx, bad_id, num_topk);
  check_cuda(cudaGetLastError(), "layout_count: the launch of the error record");
}

void check_sizes(int idx_bytes, int64_t num_tokens, int64_t num_topk, int64_t num_experts, int64_t num_ranks,
                 int num_sms) {
  MOE_EP_CHECK(idx_bytes == 4 || idx_bytes == 8, "layout_count: topk_idx has ", idx_bytes,
               " bytes an id, but int32 (4) and int64 (8) are supported: convert topk_idx.");
  MOE_EP_CHECK(num_tokens >= 0 && num_topk >= 1, "layout_count: topk_idx is [", num_tokens, ", ", num_topk,
               "], but at least [0, 1] is needed: give its shape.");
  MOE_EP_CHECK(num_tokens <= INT_MAX / num_topk, "layout_count: topk_idx has ", num_tokens, " x ", num_topk,
               " slots, but the counts are int32 and hold at most ", INT_MAX, ": split the tokens.");
  MOE_EP_CHECK(num_experts >= 1 && num_experts <= INT_MAX && num_ranks >= 1 && num_ranks <= INT_MAX,
               "layout_count: ", num_experts, " experts on ", num_ranks, " ranks were given, but 1 to ", INT_MAX,
               " of each are possible: give both numbers.");
  MOE_EP_CHECK(num_sms >= 1, "layout_count: num_sms is ", num_sms, ", but the least is 1: give the SM budget.");
}

}  // namespace

void launch_layout_count(const void* topk_idx, int idx_bytes, const int32_t* rank_of_expert, int32_t* tokens_per_expert,
                         int32_t* tokens_per_rank, uint8_t* is_token_in_rank, int64_t* bad_id, int64_t num_tokens,
                         int64_t num_topk, int64_t num_experts, int64_t num_ranks, int num_sms, cudaStream_t stream) {
  check_sizes(idx_bytes, num_tokens, num_topk, num_experts, num_ranks, num_sms);
  const auto fill = [stream](void* pointer, int byte, int64_t num_bytes) {
    check_cuda(cudaMemsetAsync(pointer, byte, static_cast<size_t>(num_bytes), stream), "layout_count: a fill");
  };
  fill(tokens_per_expert, 0, num_experts * static_cast<int64_t>(sizeof(int32_t)));
  fill(tokens_per_rank, 0, num_ranks * static_cast<int64_t>(sizeof(int32_t)));
  fill(bad_id, 0xFF, 3 * static_cast<int64_t>(sizeof(int64_t)));
  static_assert(kNone == ~int64_t{0}, "the fill of bad_id writes kNone");
  if (num_tokens == 0) {
    return;
  }
  fill(is_token_in_rank, 0, num_tokens * num_ranks);
  const auto launch_typed = idx_bytes == 8 ? launch<int64_t> : launch<int32_t>;
  launch_typed(topk_idx, rank_of_expert, tokens_per_expert, tokens_per_rank, is_token_in_rank, bad_id, num_tokens,
               num_topk, num_experts, num_ranks, num_sms, stream);
}

}  // namespace moe_ep
