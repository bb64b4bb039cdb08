// Rows travel along a plan: dispatch, and with weights the backward of combine. T tokens here, R rows handed out.
#pragma once

#include "common/row_kind.h"
#include "exchange/exchange.h"

namespace moe_ep {

// What travels with a token: its row, and where it has them its scales.
struct Rows {
  const char* x;  // [T, row_bytes], rows aligned to 16 bytes
  int64_t stride_bytes;
  int64_t row_bytes;  // a multiple of 16; 0 for no rows of this kind
  char* out;          // [R, row_bytes]
  uint64_t poison;    // fills rows that are given up, repeated
  uint64_t padding;   // fills padding rows, repeated
};

constexpr int kRowKinds = 2;

struct MoveInput {
  Rows rows[kRowKinds];
  int64_t num_tokens;
  const int32_t* recv_token;
  const int32_t* token_row;  // [T, W]
  const int32_t* pair_row;   // expert_major only
  int num_topk;
  int num_local;
  bool expert_major;
  const int32_t* geometry;
  int64_t num_rows;
  bool is_registered;  // peers read `rows` where they lie; the header says where
  int lead = 0;        // steps; the launch sets it
};

// What a weighted move does besides: out = x * weights, and grad_weights = <x, rows> where both are given.
struct MoveWeights {
  const void* weights;  // [R] float32 (float64 beside float64 rows)
  const char* rows;     // [R, row_bytes], or null
  void* grad_weights;   // [R], or null
};

// `bulk` takes the path of sm_90 and later; the others run everywhere. The weighted one there takes at most 31 slots a
// token.
void launch_move(const Call& call, const MoveInput& input, int num_sms, cudaStream_t stream);
void launch_move_bulk(const Call& call, const MoveInput& input, int num_sms, cudaStream_t stream);
// Whether the machine code that this GPU runs has the path of sm_90: code for an older one, or PTX of it, has not.
bool has_bulk_copies();
void launch_move_weighted(const Call& call, const MoveInput& input, const MoveWeights& weights, RowKind kind,
                          int num_sms, cudaStream_t stream);
void launch_move_weighted_bulk(const Call& call, const MoveInput& input, const MoveWeights& weights, RowKind kind,
                               int num_sms, cudaStream_t stream);

}  // namespace moe_ep
