// Rows travel home and are summed: combine, and the backward of dispatch. T tokens here, R rows, S compact rows.
#pragma once

#include "intranode/move.h"

namespace moe_ep {

struct CombineInput {
  const char* rows;     // [R, row_bytes] contiguous, aligned to 16 bytes
  const void* weights;  // [R] float32 (float64 beside float64 rows), or null; expert_major only
  const char* bias[2];  // [T, row_bytes] each, or null: the first terms of the sum at home
  int64_t num_tokens;
  int64_t row_bytes;         // a multiple of 16
  const int32_t* pair_row;   // [S, K] expert_major
  const int32_t* token_row;  // [T, W]
  int num_topk;
  int num_local;
  bool expert_major;
  const int32_t* geometry;
  bool is_registered;  // compact only: peers read `rows` where they lie; the header says where
  char* y;             // [T, row_bytes]
  uint64_t poison;
  int lead = 0;        // steps; the launch sets it
  int round_idx = -1;  // number of a round, with the geometry of it (`RoundGeometry`); -1 for all tokens in one call
};

// Every rank adds up, in slot order, the rows of each token that it holds (rounded once), and the token's rank adds
// those in rank order. What goes to the peers lies in staging: the rows of the compact order, without the own ones.
// Of a call in rounds (intranode/rounds.h), every round is a call of its own.
// `launch_combine_bulk` takes the path of sm_90 and later, expert_major with at most 32 slots a token; the other one
// runs everywhere.
void launch_combine(const Call& call, const CombineInput& input, RowKind kind, int num_sms, cudaStream_t stream);
void launch_combine_bulk(const Call& call, const CombineInput& input, RowKind kind, int num_sms, cudaStream_t stream);

// Every row comes home unreduced and is added in slot order, so that the number of ranks cannot show. expert_major
// only. Staging holds R rows, then pair_row and the weights, at the offsets that the header names.
struct ExactInput {
  CombineInput combine;
  const int64_t* slot_rank;  // [T, K]
  int64_t num_rows;          // R
  bool is_weighted;          // on every rank; a rank without rows has no weights
  int64_t num_compact_rows;
};
void launch_combine_exact(const Call& call, const ExactInput& input, RowKind kind, int num_sms, cudaStream_t stream);

}  // namespace moe_ep
