#include "intranode_combine.cuh"
#include "shared_memory.h"
#include "term_ring.cuh"

// Rows through shared memory by the copy engine, sm_90 and later.

namespace moe_ep {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ unsigned int lanes_before() { return (1u << lane_idx()) - 1; }

// By a whole warp: puts the rows of compact row `row` (-1: none) on this rank into the item; returns how many.
template <typename Wide>
__device__ int describe_own(const CombineInput& in, int64_t row, Item<Wide>& item) {
  if (row < 0) {
    return 0;
  }
  const uint64_t rows = reinterpret_cast<uint64_t>(in.rows);
  const int lane = lane_idx();
  if (!in.expert_major) {
    if (lane == 0) {
      item.address[0] = rows + row * in.row_bytes;
    }
    return 1;
  }
  const int64_t mine = lane < in.num_topk ? in.pair_row[row * in.num_topk + lane] : -1;
  const unsigned int mask = __ballot_sync(kFullWarp, mine >= 0);
  if (mine >= 0) {
    const int term = __popc(mask & lanes_before());
    item.address[term] = rows + mine * in.row_bytes;
    if (in.weights != nullptr) {
      item.weight[term] = static_cast<const Wide*>(in.weights)[mine];
    }
  }
  return __popc(mask);
}

// What a peer's token needs from this rank.
template <typename Wide>
__device__ int describe_for_peer(const CombineInput& in, int64_t row, Item<Wide>& item) {
  const int count = describe_own(in, row, item);
  if (lane_idx() == 0) {
    item.count = item.num_own = count;
    item.peers_before = 0;
    item.is_lost = false;
  }
  return count;
}

// What an own token needs from all ranks.
template <typename Wide>
__device__ int describe_at_home(const World& world, const CombineInput& in, const Turn& turn, unsigned int lost,
                                int64_t token, Item<Wide>& item) {
  const int lane = lane_idx();
  const int its_row = lane < world.size ? in.token_row[token * world.size + lane] : -1;
  const bool is_lost = __any_sync(kFullWarp, its_row >= 0 && (lost >> lane & 1) != 0);
  const int row = is_lost ? -1 : its_row;
  const unsigned int peers = __ballot_sync(kFullWarp, row >= 0 && lane != world.rank);
  const int num_own = describe_own(in, __shfl_sync(kFullWarp, row, world.rank), item);
  if (row >= 0 && lane != world.rank) {
    item.address[num_own + __popc(peers & lanes_before())] =
        reinterpret_cast<uint64_t>(peer_row(world, in, turn, lane, row));
  }
  const int count = num_own + __popc(peers);
  if (lane == 0) {
    item.count = count;
    item.num_own = num_own;
    item.is_lost = is_lost;
    item.peers_before = __popc(peers & ((1u << world.rank) - 1));
  }
  return count;
}

// What a row without own terms begins with.
__device__ uint4 poison_or_zero(const CombineInput& in, bool is_lost) {
  const uint32_t low = static_cast<uint32_t>(in.poison), high = static_cast<uint32_t>(in.poison >> 32);
  return is_lost ? make_uint4(low, high, low, high) : make_uint4(0, 0, 0, 0);
}

// By the adding warps of a team: adds up output rows [first, end); `out_of(i)` is where row i goes, `bias_of(i, j)` its
// first terms, or null. The own sum comes first: one accumulator serves both sums.
template <int kTeam, typename Elem, typename Wide, typename OutOf, typename BiasOf>
__device__ void add_rows(Team<kTeam, Wide>& team, const CombineInput& in, int64_t first, int64_t end, OutOf out_of,
                         BiasOf bias_of) {
  using Math = RowMath<Elem>;
  for (int64_t row = first; row < end; ++row) {
    const Item<Wide>& item = team.next_item();
    const int num_own = item.num_own, num_peers = item.count - num_own, peers_before = item.peers_before;
    char* out = out_of(row);
    for (int64_t offset = 0; offset < in.row_bytes; offset += team.cut.piece_bytes) {
      const int64_t ends = min64(offset + team.cut.piece_bytes, in.row_bytes);
      Wide total[kRingLoads][Math::kElems];
      uint4 own[kRingLoads];
      if (in.weights == nullptr && num_own == 1) {
        team.take([&](int i, uint4 term) { own[i] = term; });
      } else if (num_own > 0) {
        if (in.weights != nullptr) {
          const Wide first_weight = item.weight[0];
          team.take([&](int i, uint4 term) { Math::add_product(total[i], term, first_weight, true); });
#pragma unroll 1
          for (int j = 1; j < num_own; ++j) {
            const Wide weight = item.weight[j];
            team.take([&](int i, uint4 term) { Math::add_product(total[i], term, weight, false); });
          }
        } else {
          team.take([&](int i, uint4 term) { Math::add(total[i], term, true); });
#pragma unroll 1
          for (int j = 1; j < num_own; ++j) {
            team.take([&](int i, uint4 term) { Math::add(total[i], term, false); });
          }
        }
#pragma unroll
        for (int i = 0; i < kRingLoads; ++i) {
          own[i] = Math::rounded(total[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRingLoads; ++i) {
          own[i] = poison_or_zero(in, item.is_lost);
        }
      }
      // The sum at home: biases, then the ranks ascending. One term is the result as it is.
      const bool is_biased = bias_of(row, 0) != nullptr;
      if (!item.is_lost && (is_biased || num_peers > 0)) {
        bool is_empty = true;
#pragma unroll 1
        for (int j = 0; j < 2 && is_biased; ++j) {
          const char* bias = bias_of(row, j);
#pragma unroll
          for (int i = 0; i < kRingLoads && bias != nullptr; ++i) {
            const int64_t at = team.place(offset, i);
            Math::add(total[i], at < ends ? load_16(bias + at) : make_uint4(0, 0, 0, 0), is_empty);
          }
          is_empty = false;
        }
#pragma unroll 1
        for (int j = 0; j <= num_peers; ++j) {
          if (j == peers_before && num_own > 0) {
#pragma unroll
            for (int i = 0; i < kRingLoads; ++i) {
              Math::add(total[i], own[i], is_empty);
            }
            is_empty = false;
          }
          if (j < num_peers) {
            team.take([&](int i, uint4 term) { Math::add(total[i], term, is_empty); });
            is_empty = false;
          }
        }
#pragma unroll
        for (int i = 0; i < kRingLoads; ++i) {
          own[i] = Math::rounded(total[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRingLoads; ++i) {
        const int64_t at = team.place(offset, i);
        if (at < ends) {
          store_16(out + at, own[i]);
        }
      }
    }
    team.release_item();
  }
}

// The compact rows that a ticket reduces.
__device__ Span rows_to_reduce(const World& world, const CombineInput& in, const CombineWork& work) {
  const int32_t* chunk_rows =
      in.geometry + Geometry::chunk_rows(world.size) + work.source * (kMaxChunks + 1) + work.chunk;
  return part_of<kCombineParts>(chunk_rows[0], chunk_rows[1], work.part);
}

template <int kTeam, typename Elem>
__global__ void __launch_bounds__(kRingThreads<kTeam>, 1)
    moe_ep_combine_bulk(const __grid_constant__ Call call, const __grid_constant__ CombineInput in, const Cut cut) {
  using Wide = typename RowMath<Elem>::Wide;
  extern __shared__ __align__(128) char shared[];
  __shared__ TeamState<Wide> states[kNumTeams<kTeam>];
  const World& world = call.world;
  const Turn turn = turn_of(world);
  Team<kTeam, Wide> team(shared, states, cut);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;  // a slot need not hold what came
  const uint32_t verdict = open_call(call, turn, overflowed);
  const unsigned int lost = lost_ranks(world, turn);
  const int most = verdict == kGo ? most_chunks(in.geometry, world.size) : 0;
  const auto for_peer = [&](int64_t row, Item<Wide>& item) { return describe_for_peer(in, row, item); };
  const auto at_home = [&](int64_t token, Item<Wide>& item) {
    return describe_at_home(world, in, turn, lost, token, item);
  };
  if (verdict == kGo && team.fetches()) {
    for (;;) {
      uint32_t ticket = team.take_ticket(world.state);
      CombineWork work = combine_work(world, ticket, most);
      if (work.kind == CombineWork::kHome && !chunk_is_reduced(world, turn, work.chunk)) {
        ticket = kNoTicket;
        work.kind = CombineWork::kEnd;
      }
      team.hand_on(ticket);
      if (work.kind == CombineWork::kEnd) {
        break;
      }
      fence_copy_engine();
      if (work.kind == CombineWork::kReduce && !in.is_registered && !overflowed) {
        const Span span = rows_to_reduce(world, in, work);
        team.fetch(in.row_bytes, span.first, span.first + span.count, for_peer);
      } else if (work.kind == CombineWork::kHome) {
        const Span span = part_of_tokens<kCombineParts>(in.num_tokens, work.chunk, work.part);
        team.fetch(in.row_bytes, span.first, span.first + span.count, at_home);
      }
    }
  } else if (verdict == kGo) {
    for (;;) {
      const uint32_t ticket = team.get_ticket();
      const CombineWork work = combine_work(world, ticket, most);
      if (ticket == kNoTicket || work.kind == CombineWork::kEnd) {
        break;
      }
      if (work.kind == CombineWork::kReduce && !in.is_registered) {
        const Span span = rows_to_reduce(world, in, work);
        char* staging =
            slot_of(world, world.rank, turn) - staging_shift(in, world.size, world.rank, work.source) * in.row_bytes;
        if (!overflowed) {
          add_rows<kTeam, Elem>(
              team, in, span.first, span.first + span.count, [&](int64_t row) { return staging + row * in.row_bytes; },
              [](int64_t, int) -> const char* { return nullptr; });
        }
        fence_copy_engine();
        __threadfence_system();
        team.sync_adders();
        if (team.thread() == 0) {
          __threadfence_system();
          post_flag(world, turn, work.source, work.chunk * kCombineParts + work.part);
        }
      } else if (work.kind == CombineWork::kHome) {
        const Span span = part_of_tokens<kCombineParts>(in.num_tokens, work.chunk, work.part);
        add_rows<kTeam, Elem>(
            team, in, span.first, span.first + span.count, [&](int64_t token) { return in.y + token * in.row_bytes; },
            [&](int64_t token, int i) { return in.bias[i] == nullptr ? nullptr : in.bias[i] + token * in.row_bytes; });
      }
    }
  }
  const Output output = {in.y, in.num_tokens * in.row_bytes, in.poison};
  if (is_last_block(world.state)) {
    if (verdict == kGo && in.geometry[Geometry::kNoPlan] != 0) {
      fill_output(output);
    }
    close_call(call, turn, verdict, &output, 1, in.is_registered);
  }
}

#else

template <int kTeam, typename Elem>
__global__ void moe_ep_combine_bulk(const __grid_constant__ Call, const __grid_constant__ CombineInput, const Cut) {}

#endif

}  // namespace

void launch_combine_bulk(const Call& call, const CombineInput& input, RowKind kind, int num_sms, cudaStream_t stream) {
  for_team(input.row_bytes, [&](auto team) {
    constexpr int kTeam = decltype(team)::value;
    for_kind(kind, [&](auto elem) {
      constexpr auto kernel = moe_ep_combine_bulk<kTeam, decltype(elem)>;
      allow_shared_memory<kernel>(kRingBytes, "combine: the shared memory of the rings");
      kernel<<<num_sms, kRingThreads<kTeam>, kRingBytes, stream>>>(call, input, cut_of<kTeam>(input.row_bytes));
    });
  });
  check_cuda(cudaGetLastError(), "combine: the launch");
}

}  // namespace moe_ep
