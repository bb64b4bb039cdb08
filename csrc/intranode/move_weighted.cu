#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/row_math.cuh"
#include "intranode/move.cuh"

namespace moe_ep {
namespace {

// -- with weights: the backward of combine

constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = kTeamWarps * 32;
constexpr int kTeams = 4;
constexpr int kLoads = 8;  // of 16 bytes that a thread holds
constexpr int kBlockBytes = kLoads * kTeamThreads * 16;

// By a whole team.
__device__ void team_sync(int team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeamThreads) : "memory"); }

// By a whole team: a row to `staging`, where that is given, and weighted to the places of compact row `compact`, where
// that is not -1.
template <typename Elem>
__device__ void move_row_weighted(const MoveInput& in, const MoveWeights& w, const char* source, int64_t compact,
                                  char* staging, int team, typename RowMath<Elem>::Wide* partial) {
  using Math = RowMath<Elem>;
  using Wide = typename Math::Wide;
  const int thread = threadIdx.x % kTeamThreads;
  const int32_t* pairs = in.pair_row + compact * in.num_topk;
  for (int64_t begin = 0; begin < in.rows[0].row_bytes; begin += kBlockBytes) {
    uint4 values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t at = begin + (i * kTeamThreads + thread) * 16;
      if (at < in.rows[0].row_bytes) {
        values[i] = load_16(source + at);
        if (staging != nullptr) {
          store_16(staging + at, values[i]);
        }
      }
    }
    for (int k = 0; k < in.num_topk && compact >= 0; ++k) {
      const int64_t row = pairs[k];
      if (row < 0) {
        continue;
      }
      const Wide weight = static_cast<const Wide*>(w.weights)[row];
      Wide dot = 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t at = begin + (i * kTeamThreads + thread) * 16;
        if (at < in.rows[0].row_bytes) {
          if (w.rows != nullptr) {
            dot += Math::dot(values[i], load_16(w.rows + row * in.rows[0].row_bytes + at));
          }
          store_16(in.rows[0].out + row * in.rows[0].row_bytes + at, Math::scale(values[i], weight));
        }
      }
      if (w.rows == nullptr) {
        continue;
      }
      for (int step = 16; step > 0; step /= 2) {
        dot += __shfl_xor_sync(kFullWarp, dot, step);
      }
      if (lane_idx() == 0) {
        partial[thread / 32] = dot;
      }
      team_sync(team);
      if (thread == 0) {
        Wide sum = partial[0] + partial[1] + partial[2] + partial[3];
        Wide* grad = static_cast<Wide*>(w.grad_weights) + row;
        *grad = begin == 0 ? sum : *grad + sum;
      }
      team_sync(team);
    }
  }
}

template <typename Elem>
__global__ void __launch_bounds__(kTeams* kTeamThreads, 1)
    moe_ep_move_weighted(const __grid_constant__ Call call, const __grid_constant__ MoveInput in,
                         const __grid_constant__ MoveWeights w) {
  using Wide = typename RowMath<Elem>::Wide;
  __shared__ Wide partial[kTeams][kTeamWarps];
  __shared__ uint32_t tickets[kTeams];
  __shared__ bool arrived[kTeams];
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const int team = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads, warp = thread / 32;
  const uint32_t verdict = open_call(call, turn);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
  if (verdict == kGo) {
    const int most = most_chunks(in.geometry, world.size);
    for (;;) {
      team_sync(team);
      if (thread == 0) {
        tickets[team] = atomicAdd(&world.state->next_ticket, 1u);
      }
      team_sync(team);
      const MoveWork work = move_work(world, in, tickets[team], most);
      if (work.kind == MoveWork::kEnd) {
        break;
      }
      if (work.kind == MoveWork::kOwn) {
        const Span span = part_of_tokens(in.num_tokens, work.chunk, work.part);
        char* staging = slot_of(world, world.rank, turn);
        for (int64_t token = span.first; token < span.first + span.count; ++token) {
          const OwnToken own = own_token(world, in, token);
          move_row_weighted<Elem>(
              in, w, in.rows[0].x + token * in.rows[0].stride_bytes, overflowed ? -1 : own.compact_row,
              own.is_wanted ? staging + token * in.rows[0].row_bytes : nullptr, team, partial[team]);
        }
        team_sync(team);
        if (warp == 0) {
          post_chunk(world, turn, work);
        }
      } else if (work.kind == MoveWork::kPull && !overflowed) {
        const Span span = rows_of(world, in, work);
        if (span.count == 0) {
          continue;
        }
        if (warp == 0) {
          const bool here = chunk_arrived(world, turn, work);
          if (thread == 0) {
            arrived[team] = here;
          }
        }
        team_sync(team);
        if (!arrived[team]) {
          continue;
        }
        const Place source = source_place(world, in, turn, work.source, 0);
        for (int64_t row = span.first; row < span.first + span.count; ++row) {
          move_row_weighted<Elem>(in, w, source.rows + in.recv_token[row] * source.stride_bytes, row, nullptr, team,
                                  partial[team]);
        }
      } else if (work.kind == MoveWork::kPad || work.kind == MoveWork::kTail) {
        const Span span = padding_of(world, in, work);
        pad_rows(in, span, thread, kTeamThreads);
        for (int64_t i = thread; w.grad_weights != nullptr && i < span.count; i += kTeamThreads) {
          static_cast<Wide*>(w.grad_weights)[span.first + i] = 0;
        }
      }
    }
  }
  const Output outputs[] = {
      {in.rows[0].out, in.num_rows * in.rows[0].row_bytes, in.rows[0].poison},
      {w.grad_weights, in.num_rows * static_cast<int64_t>(sizeof(Wide)),
       sizeof(Wide) == 8 ? 0x7FF8000000000000ull : 0x7FC000007FC00000ull},
  };
  if (is_last_block(world.state)) {
    if (verdict == kGo && overflowed) {
      fill_output(outputs[0]);
      fill_output(outputs[1]);
    }
    close_call(call, turn, verdict, outputs, 2, false);
  }
}

}  // namespace

void launch_move_weighted(const Call& call, const MoveInput& input, const MoveWeights& weights, RowKind kind,
                          int num_sms, cudaStream_t stream) {
  for_kind(kind, [&](auto elem) {
    moe_ep_move_weighted<decltype(elem)>
        <<<num_sms, kTeams * kTeamThreads, 0, stream>>>(call, with_lead(input, call.world, num_sms * kTeams), weights);
  });
  check_cuda(cudaGetLastError(), "combine backward: the launch");
}

}  // namespace moe_ep
