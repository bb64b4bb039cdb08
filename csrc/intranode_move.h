// Rows travel along a plan: dispatch, and with weights the backward of combine. T tokens here, R rows handed out.
#pragma once

#include <string>

#include "exchange.h"

namespace moe_ep {

struct MoveInput {
  const char* x;  // [T, row_bytes], rows aligned to 16 bytes
  int64_t x_stride_bytes;
  int64_t num_tokens;
  int64_t row_bytes;  // a multiple of 16
  const int32_t* recv_token;
  const int32_t* pair_row;  // expert_major only
  int num_topk;
  int num_local;
  bool expert_major;
  const int32_t* geometry;
  char* out;  // [R, row_bytes]
  int64_t num_rows;
  uint64_t poison;   // fills rows that are given up, repeated
  uint64_t padding;  // fills padding rows, repeated
};

// What a weighted move does besides: out = x * weights, and grad_weights = <x, rows> where both are given.
struct MoveWeights {
  const void* weights;  // [R] float32 (float64 beside float64 rows)
  const char* rows;     // [R, row_bytes], or null
  void* grad_weights;   // [R], or null
};

enum class RowKind { kBFloat16, kFloat16, kFloat32, kFloat64 };

// `use_tma` takes the path of sm_90 and later; the other one runs everywhere.
void launch_move(const Call& call, const MoveInput& input, bool use_tma, int num_sms, cudaStream_t stream);
void launch_move_weighted(const Call& call, const MoveInput& input, const MoveWeights& weights, RowKind kind,
                          int num_sms, cudaStream_t stream);

}  // namespace moe_ep
