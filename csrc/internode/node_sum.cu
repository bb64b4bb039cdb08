#include "common/grid.h"
#include "internode/node_sum.h"
#include "intranode/combine.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

// A warp adds up a token. Lanes look 32 nodes up at a time; few of them have a row.
template <typename Elem>
__device__ void add_nodes(const NodeSumInput& in, int64_t token, bool failed) {
  const int32_t* place = in.place + token * in.num_nodes;
  for (int64_t begin = 0; begin < in.row_bytes; begin += Columns<Elem>::kBytes) {
    Sum<Elem> sum;
    for (const char* bias : in.bias) {
      if (bias != nullptr) {
        Columns<Elem> term;
        term.load(bias + token * in.row_bytes, begin, in.row_bytes);
        sum.add(term);
      }
    }
    for (int first = 0; first < in.num_nodes; first += 32) {
      const int mine = first + lane_idx() < in.num_nodes ? place[first + lane_idx()] : -1;
      for (unsigned int left = __ballot_sync(kFullWarp, mine >= 0); left != 0; left &= left - 1) {
        const int node = first + __ffs(left) - 1;
        const int64_t row = __shfl_sync(kFullWarp, mine, __ffs(left) - 1);
        const char* rows = node == in.node ? in.own : in.inbox + node * in.flow_bytes;
        const int64_t place_there = node == in.node && !in.own_by_place ? token : row;
        Columns<Elem> term;
        term.load(rows + place_there * in.row_bytes, begin, in.row_bytes);
        sum.add(term);
      }
    }
    Columns<Elem> y = sum.rounded();
    if (failed) {
      const uint32_t low = static_cast<uint32_t>(in.poison), high = static_cast<uint32_t>(in.poison >> 32);
      for (uint4& raw : y.raw) {
        raw = make_uint4(low, high, low, high);
      }
    }
    store_columns(y, in.y + token * in.row_bytes, begin, in.row_bytes);
  }
}

template <typename Elem>
__global__ void __launch_bounds__(kThreads, 1) moe_ep_node_sum(const __grid_constant__ NodeSumInput in) {
  const bool failed = load_acquire_gpu(&in.state->failed) != 0 || load_acquire_gpu(&in.state->refused) != 0;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * kThreads / 32;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads / 32 + warp_idx(); i < in.num_tokens; i += num_warps) {
    add_nodes<Elem>(in, in.first_token + i, failed);
  }
}

}  // namespace

void launch_node_sum(const NodeSumInput& input, RowKind kind, int num_sms, cudaStream_t stream) {
  const unsigned int grid = grid_size(input.num_tokens, kThreads / 32, num_sms);
  if (grid == 0) {
    return;
  }
  for_kind(kind, [&](auto elem) { moe_ep_node_sum<decltype(elem)><<<grid, kThreads, 0, stream>>>(input); });
  check_cuda(cudaGetLastError(), "internode: the launch of a sum over nodes");
}

}  // namespace moe_ep
