// The small exchanges: numbers that come home along a plan, a sum over all ranks, a call without a payload.
#pragma once

#include "exchange/exchange.h"

namespace moe_ep {

enum class Number { kFloat32, kFloat64, kInt32, kInt64, kBFloat16, kFloat16 };

// K numbers a compact row come home: [S, K] here -> [T, K] there.
struct NumbersInput {
  const void* numbers;       // [S, K], or [R] with pair_row (0 for slots that have no row)
  const int32_t* pair_row;   // [S, K], or null
  const int32_t* token_row;  // [T, W]
  const int64_t* slot_rank;  // [T, K]
  int64_t num_compact_rows;  // S
  int64_t num_tokens;
  int num_topk;
  const int32_t* geometry;
  bool sums;  // true: adds the rows of all ranks, ascending; false: takes each slot from the rank of its expert
  void* out;  // [T, K]
};
void launch_numbers_home(const Call& call, const NumbersInput& input, Number kind, int num_sms, cudaStream_t stream);

// out = the sum of `in` over the ranks, ascending; both [count], and may be one.
void launch_all_reduce(const Call& call, const void* in, void* out, int64_t count, Number kind, int num_sms,
                       cudaStream_t stream);

// A header and its verdict, nothing else: a rank that refuses, or asks all to grow.
void launch_header_only(const Call& call, cudaStream_t stream);

// Ends a call of which the first kernel has run and the second never will: the host failed after the verdict (7).
void launch_done_only(const Call& call, cudaStream_t stream);

// Waits until every peer is done with all calls of this rank, so that memory they read can be freed.
void launch_drain(const Call& call, cudaStream_t stream);

}  // namespace moe_ep
