// The last step of a combine between nodes: what the nodes have for each token is added up at home. T tokens, N nodes.
#pragma once

#include "common/row_kind.h"
#include "internode/rail.h"

namespace moe_ep {

struct NodeSumInput {
  const char* inbox;   // of the round's slot: the flow of node n begins at n * flow_bytes
  int64_t flow_bytes;  // a multiple of 16
  const char* own;     // [T, row_bytes] what the own node has; or, by place, rows in another order
  bool own_by_place;
  const char* bias[2];  // [T, row_bytes] each, or null: the first terms
  const int32_t*
      place;  // [T, N] row of a token in the flow of a node, -1 for none; of the own node, if by place, in `own`
  int node;
  int num_nodes;
  int64_t first_token;  // of the round
  int64_t num_tokens;
  int64_t row_bytes;   // a multiple of 16
  char* y;             // [T, row_bytes]
  uint64_t poison;     // fills y where the exchange has failed, or the call was refused; repeated
  const State* state;  // of the exchange inside the node
};

// Nodes ascending, behind the bias, in float32 (float64 for float64 rows), rounded once.
void launch_node_sum(const NodeSumInput& input, RowKind kind, int num_sms, cudaStream_t stream);

}  // namespace moe_ep
