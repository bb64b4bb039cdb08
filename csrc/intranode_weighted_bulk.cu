#include "intranode_move.cuh"
#include "row_math.cuh"
#include "shared_memory.h"
#include "term_ring.cuh"

// The backward of a weighted combine through shared memory, sm_90 and later: out[row] = x * weight[row] for each place
// of a token, and grad_weights[row] = <x, made_rows[row]>. The terms of a compact row are the row that came, x, and
// behind it what the experts had made, row by row.

namespace moe_ep {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Term 0 is x; term 1 + n is made row number n, in slot order. Place and weight number n are those of row n. What is
// fetched is x alone where no gradient of the weights is wanted.
template <typename Wide>
__device__ int describe_row(const MoveInput& in, const MoveWeights& w, const Place& source, int64_t row,
                            Item<Wide>& item) {
  const int lane = lane_idx();
  const int mine = lane < in.num_topk ? in.pair_row[row * in.num_topk + lane] : -1;
  const unsigned int mask = __ballot_sync(kFullWarp, mine >= 0);
  if (mine >= 0) {
    const int number = __popc(mask & ((1u << lane) - 1));
    item.place[number] = mine;
    item.weight[number] = static_cast<const Wide*>(w.weights)[mine];
    item.address[1 + number] = reinterpret_cast<uint64_t>(w.rows) + mine * in.rows[0].row_bytes;
  }
  const int num_places = __popc(mask), count = w.rows == nullptr ? 1 : 1 + num_places;
  if (lane == 0) {
    item.address[0] = reinterpret_cast<uint64_t>(source.rows + in.recv_token[row] * source.stride_bytes);
    item.num_own = num_places;
    item.count = count;
  }
  return count;
}

// By the adding warps of a team: compact rows [first, end).
template <int kTeam, typename Elem, typename Wide>
__device__ void weigh_rows(Team<kTeam, Wide>& team, const MoveInput& in, const MoveWeights& w, int64_t first,
                           int64_t end, Wide (*partial)[kMaxTerms]) {
  using Math = RowMath<Elem>;
  const int64_t row_bytes = in.rows[0].row_bytes;
  for (int64_t row = first; row < end; ++row) {
    const Item<Wide>& item = team.next_item();
    const int num_places = item.num_own;
    Wide dots = 0;  // lane j: of place j, over the pieces so far
    for (int64_t offset = 0; offset < row_bytes; offset += team.cut.piece_bytes) {
      const int64_t ends = min64(offset + team.cut.piece_bytes, row_bytes);
      uint4 x[kRingLoads];
      team.take([&](int i, uint4 term) { x[i] = term; });
#pragma unroll 1
      for (int j = 0; j < num_places; ++j) {
        const int64_t place = item.place[j];
        const Wide weight = item.weight[j];
        if (w.rows != nullptr) {
          Wide dot = 0;
          team.take([&](int i, uint4 made) {
            if (team.place(offset, i) < ends) {
              dot += Math::dot(x[i], made);
            }
          });
          for (int step = 16; step > 0; step /= 2) {
            dot += __shfl_xor_sync(kFullWarp, dot, step);
          }
          dots += lane_idx() == j ? dot : Wide(0);
        }
        char* out = in.rows[0].out + place * row_bytes;
#pragma unroll
        for (int i = 0; i < kRingLoads; ++i) {
          const int64_t at = team.place(offset, i);
          if (at < ends) {
            store_16(out + at, Math::scale(x[i], weight));
          }
        }
      }
    }
    if (w.rows != nullptr) {
      partial[team.thread() / 32][lane_idx()] = dots;
      team.sync_adders();
      if (team.thread() < num_places) {
        Wide sum = 0;
        for (int warp = 0; warp < kTeam; ++warp) {
          sum += partial[warp][team.thread()];
        }
        static_cast<Wide*>(w.grad_weights)[item.place[team.thread()]] = sum;
      }
      team.sync_adders();
    }
    team.release_item();
  }
}

template <int kTeam, typename Elem>
__global__ void __launch_bounds__(kRingThreads<kTeam>, 1)
    moe_ep_move_weighted_bulk(const __grid_constant__ Call call, const __grid_constant__ MoveInput in,
                              const __grid_constant__ MoveWeights w, const Cut cut) {
  using Wide = typename RowMath<Elem>::Wide;
  extern __shared__ __align__(128) char shared[];
  __shared__ TeamState<Wide> states[kNumTeams<kTeam>];
  __shared__ Wide partial[kNumTeams<kTeam>][kTeam][kMaxTerms];
  const World& world = call.world;
  const Turn turn = turn_of(world);
  Team<kTeam, Wide> team(shared, states, cut);
  const uint32_t verdict = open_call(call, turn);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
  const int most = verdict == kGo ? most_chunks(in.geometry, world.size) : 0;
  if (verdict == kGo && team.fetches()) {
    for (;;) {
      uint32_t ticket = team.take_ticket(world.state);
      const MoveWork work = move_work(world, in, ticket, most);
      const bool pulls = work.kind == MoveWork::kPull && !overflowed;
      if (pulls && !chunk_arrived(world, turn, work)) {
        ticket = kNoTicket;
      }
      team.hand_on(ticket);
      if (ticket == kNoTicket || work.kind == MoveWork::kEnd) {
        break;
      }
      if (pulls) {
        fence_copy_engine();
        const Span span = rows_of(world, in, work);
        const Place source = source_place(world, in, turn, work.source, 0);
        team.fetch(in.rows[0].row_bytes, span.first, span.first + span.count,
                   [&](int64_t row, Item<Wide>& item) { return describe_row(in, w, source, row, item); });
      }
    }
  } else if (verdict == kGo) {
    for (;;) {
      const uint32_t ticket = team.get_ticket();
      const MoveWork work = move_work(world, in, ticket, most);
      if (ticket == kNoTicket || work.kind == MoveWork::kEnd) {
        break;
      }
      if (work.kind == MoveWork::kPublish) {
        const Span span = part_of_tokens<kMoveParts>(in.num_tokens, work.chunk, work.part);
        char* staging = slot_of(world, world.rank, turn);
        for (int64_t token = span.first + team.thread() / 32; token < span.first + span.count; token += kTeam) {
          copy_row(in.rows[0].x + token * in.rows[0].stride_bytes, staging, in.rows[0].row_bytes,
                   lane_idx() == 0 ? static_cast<int>(token) : -1, -1);
        }
        fence_copy_engine();
        __threadfence_system();
        team.sync_adders();
        if (team.thread() < 32) {
          post_chunk(world, turn, work);
        }
      } else if (work.kind == MoveWork::kPull && !overflowed) {
        const Span span = rows_of(world, in, work);
        weigh_rows<kTeam, Elem>(team, in, w, span.first, span.first + span.count, partial[team.number()]);
      } else if (work.kind == MoveWork::kPad || work.kind == MoveWork::kTail) {
        const Span span = padding_of(world, in, work);
        pad_rows(in, span, team.thread(), kTeam * 32);
        for (int64_t i = team.thread(); w.grad_weights != nullptr && i < span.count; i += kTeam * 32) {
          static_cast<Wide*>(w.grad_weights)[span.first + i] = 0;
        }
      }
    }
  }
  if (!is_last_block(world.state)) {
    return;
  }
  const Output outputs[] = {
      {in.rows[0].out, in.num_rows * in.rows[0].row_bytes, in.rows[0].poison},
      {w.grad_weights, in.num_rows * static_cast<int64_t>(sizeof(Wide)),
       sizeof(Wide) == 8 ? 0x7FF8000000000000ull : 0x7FC000007FC00000ull},
  };
  if (verdict == kGo && overflowed) {
    fill_output(outputs[0]);
    fill_output(outputs[1]);
  }
  close_call(call, turn, verdict, outputs, 2, false);
}

#else

template <int kTeam, typename Elem>
__global__ void moe_ep_move_weighted_bulk(const __grid_constant__ Call, const __grid_constant__ MoveInput,
                                          const __grid_constant__ MoveWeights, const Cut) {}

#endif

}  // namespace

void launch_move_weighted_bulk(const Call& call, const MoveInput& input, const MoveWeights& weights, RowKind kind,
                               int num_sms, cudaStream_t stream) {
  for_team(input.rows[0].row_bytes, [&](auto team) {
    constexpr int kTeam = decltype(team)::value;
    for_kind(kind, [&](auto elem) {
      constexpr auto kernel = moe_ep_move_weighted_bulk<kTeam, decltype(elem)>;
      allow_shared_memory<kernel>(kRingBytes, "combine backward: the shared memory of the rings");
      kernel<<<num_sms, kRingThreads<kTeam>, kRingBytes, stream>>>(call, input, weights,
                                                                   cut_of<kTeam>(input.rows[0].row_bytes));
    });
  });
  check_cuda(cudaGetLastError(), "combine backward: the launch");
}

}  // namespace moe_ep
