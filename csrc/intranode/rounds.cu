#include "common/check.h"
#include "exchange/device.cuh"
#include "intranode/rounds.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

// By a whole warp: the compact row on `rank` of the first of these own tokens that goes there; 0 if none does.
__device__ int32_t first_row_on(const RoundsInput& in, const TokenRange& range, int rank) {
  for (int64_t begin = 0; begin < range.count; begin += 32) {
    const int64_t token = begin + lane_idx();
    const int32_t row = token < range.count ? in.token_row[(range.first + token) * in.size + rank] : -1;
    const unsigned int found = __ballot_sync(kFullWarp, row >= 0);
    if (found != 0) {
      return __shfl_sync(kFullWarp, row, __ffs(found) - 1);
    }
  }
  return 0;
}

__global__ void __launch_bounds__(kThreads) moe_ep_combine_rounds(const __grid_constant__ RoundsInput in) {
  const int size = in.size, num_chunk_rows = size * (kMaxChunks + 1);
  const bool one_round = is_one_round(in);
  for (int round = blockIdx.x; round < in.num_rounds; round += gridDim.x) {
    int32_t* out = in.rounds + round * RoundGeometry::length(size);
    if (threadIdx.x == 0) {
      out[RoundGeometry::kFirstToken] = static_cast<int32_t>(range_of(in, one_round, round, in.rank).first);
      out[RoundGeometry::kTooLarge] = is_too_large(in, one_round, round);
      out[Geometry::kOverflowed] = in.geometry[Geometry::kOverflowed];
      out[Geometry::kNoPlan] = in.geometry[Geometry::kNoPlan];
    }
    if (threadIdx.x < size) {
      const int source = threadIdx.x;
      out[Geometry::kTokens + source] = static_cast<int32_t>(range_of(in, one_round, round, source).count);
    }
    for (int i = threadIdx.x; i < num_chunk_rows; i += kThreads) {
      const int source = i / (kMaxChunks + 1), chunk = i % (kMaxChunks + 1);
      out[Geometry::chunk_rows(size) + i] = chunk_row_of(in, one_round, round, source, chunk);
    }
    int32_t* const shifts = out + RoundGeometry::shifts(size);
    if (threadIdx.x < size) {
      const int source = threadIdx.x;
      const int32_t first_row = chunk_row_of(in, one_round, round, source, 0);
      shifts[in.rank * size + source] = shift_of(in, one_round, round, in.rank, source, first_row);
    }
    for (int peer = warp_idx(); peer < size; peer += kThreads / 32) {
      if (peer == in.rank) {
        continue;
      }
      const int32_t first_row = one_round ? 0 : first_row_on(in, range_of(in, false, round, in.rank), peer);
      if (lane_idx() == 0) {
        shifts[peer * size + in.rank] = shift_of(in, one_round, round, peer, in.rank, first_row);
      }
    }
  }
}

}  // namespace

void launch_rounds(LaunchCombine launch, const Call& call, CombineInput input, const RoundsInput& rounds, RowKind kind,
                   int num_sms, cudaStream_t stream) {
  const int num_blocks = rounds.num_rounds < num_sms ? rounds.num_rounds : num_sms;
  moe_ep_combine_rounds<<<num_blocks, kThreads, 0, stream>>>(rounds);
  check_cuda(cudaGetLastError(), "combine: the launch of its rounds");
  for (input.round_idx = 0; input.round_idx < rounds.num_rounds; ++input.round_idx) {
    input.geometry = rounds.rounds + input.round_idx * RoundGeometry::length(rounds.size);
    launch(call, input, kind, num_sms, stream);
  }
}

}  // namespace moe_ep
