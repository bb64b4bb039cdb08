// What a routing table says about traffic. T tokens, K experts per token, E experts, W ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moe_ep {

// Counts, from topk_idx, the rows that each expert and each rank will get.
//
//   topk_idx           in   [T, K] int32 or int64 (idx_bytes 4 or 8), contiguous; -1 = no expert
//   rank_of_expert     in   [E] int32, each in [0, W): the caller's own table, not checked here
//   tokens_per_expert  out  [E] int32: slots that name the expert; a token that names it twice counts twice
//   tokens_per_rank    out  [W] int32: tokens with at least one expert there; a token counts once a rank
//   is_token_in_rank   out  [T, W] bool (one byte, 0 or 1)
//   bad_id             out  [3] int64: token, slot and id of the first id outside [-1, E) in reading order, or
//                           -1, -1, -1; such an id is never used as an index and counts as -1
//   num_sms            at most this many SMs are used (>= 1)
//   stream             a cudaStream_t of the device that is current and owns every pointer
//
// With E = 4, W = 2, rank_of_expert = [0, 0, 1, 1] and topk_idx = [[0, 1], [1, 2], [3, 3], [-1, 0]]:
// tokens_per_expert = [2, 2, 1, 2], tokens_per_rank = [3, 2],
// is_token_in_rank = [[1, 0], [1, 1], [0, 1], [1, 0]], bad_id = [-1, -1, -1].
//
// Ownership: the caller allocates and keeps everything alive until the work on `stream` is done; no output needs to be
// zeroed before. The result does not depend on the order in which threads run. Does not wait for the device.
// Throws std::runtime_error where a size is out of range (T * K < 2^31, because counts are int32) or a launch fails.
void launch_layout_count(const void* topk_idx, int idx_bytes, const int32_t* rank_of_expert, int32_t* tokens_per_expert,
                         int32_t* tokens_per_rank, uint8_t* is_token_in_rank, int64_t* bad_id, int64_t num_tokens,
                         int64_t num_topk, int64_t num_experts, int64_t num_ranks, int num_sms, cudaStream_t stream);

}  // namespace moe_ep
