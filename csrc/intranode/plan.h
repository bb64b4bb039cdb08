// Planning a dispatch inside a node: who sends what where. T tokens of this rank, K slots, E experts, L local, W ranks,
// S compact rows and R rows handed out on this rank.
#pragma once

#include "exchange/exchange.h"

namespace moe_ep {

struct PlanInput {
  const void* ids;  // [T, K] int32 or int64, strides in elements
  int id_bytes;
  int64_t id_stride_token, id_stride_slot;
  const void* weights;  // [T, K] float32 or float64, or null
  int weight_bytes;     // 4, 8, or 0
  int64_t weight_stride_token, weight_stride_slot;
  int64_t num_tokens;
  int num_topk;
  int num_experts;
  int num_local;
  const int32_t* owner;      // [E] rank of an expert, device
  const int32_t* local_idx;  // [E] its local id there, device
  int64_t alignment;
  bool expert_major;
  int64_t max_rows;         // -1: as many as come, and the host waits
  int32_t* chunk_counts;    // [W, kMaxChunks, L + W] scratch
  int32_t* geometry;        // out, Geometry::length(W, L)
  int32_t* expert_counts;   // out, [L] without padding
  int32_t* expert_offsets;  // out, [L + 1] with padding
};

struct PlanOutput {
  bool only_if_enough;  // laid out before the counts were known: where it does not hold all, the plan is left as it is
  int64_t capacity;     // compact rows that recv_token and pair_row hold
  int64_t num_rows;     // R, or with only_if_enough as many as there is room for
  void* row_idx;        // [S, K] or [R], dtype of the ids
  void* row_weights;    // beside them, or null
  int32_t* recv_token;  // [S]
  int32_t* pair_row;    // [S, K] expert_major: row of each (compact row, slot), -1 where none
  int64_t* row_pair;    // [R] expert_major: compact row * K + slot, -1 for padding
  int32_t* token_row;   // [T, W]: compact row of a token on each rank, -1 where it does not go
  int64_t* slot_rank;   // [T, K]
  int64_t* send_token;  // [S_send], or null
};

// First kernel: publishes ids and weights, exchanges headers, counts. Fills `geometry` and, where the call has a
// question, the host's record; the call goes on with plan_fill, unless the verdict ends it (host waits) here.
void launch_plan_count(const Call& call, const PlanInput& input, int num_sms, cudaStream_t stream);

// Second kernel: lays out the rows and ends the call. With only_if_enough it does nothing where the verdict has ended
// the call, or where there is not enough room; another launch has to follow then.
void launch_plan_fill(const Call& call, const PlanInput& input, const PlanOutput& output, int num_sms,
                      cudaStream_t stream);

}  // namespace moe_ep
