// A combine in rounds: where its staging would be larger than a slot, it is done as several calls, each for a range of
// tokens of every source. T tokens here, S compact rows.
#pragma once

#include "intranode/combine.h"

namespace moe_ep {

struct RoundsInput {
  int rank;
  int size;
  const int32_t* geometry;    // of the handle
  const int32_t* recv_token;  // [S]
  const int32_t* token_row;   // [T, W]
  int64_t slot_rows;          // that staging holds
  int num_rounds;
  int32_t* rounds;  // [num_rounds, RoundGeometry::length(W)]
};

// The rounds of a combine through `launch`, behind a kernel that writes their geometries. The first one has all tokens
// where the rows that each rank has for its peers fit into a slot, and the others none, which are no calls then;
// otherwise every source's tokens are cut evenly. `input` has the handle's geometry.
using LaunchCombine = void (*)(const Call&, const CombineInput&, RowKind, int, cudaStream_t);
void launch_rounds(LaunchCombine launch, const Call& call, CombineInput input, const RoundsInput& rounds, RowKind kind,
                   int num_sms, cudaStream_t stream);

}  // namespace moe_ep
