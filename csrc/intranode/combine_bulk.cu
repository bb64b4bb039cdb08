#include "common/shared_memory.h"
#include "intranode/combine.cuh"
#include "intranode/term_ring.cuh"

// Rows through shared memory by the copy engine, sm_90 and later.

namespace moe_ep {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// By a whole warp: puts what this rank has for compact rows `row` (-1: none) into the items; returns the number of rows
// of each.
template <typename Wide>
__device__ void describe_own(const CombineInput& in, const int64_t (&row)[kDescribed], Item<Wide>* (&items)[kDescribed],
                             int (&num_own)[kDescribed]) {
  const uint64_t rows = reinterpret_cast<uint64_t>(in.rows);
  const int lane = lane_idx();
  if (!in.expert_major) {
#pragma unroll
    for (int i = 0; i < kDescribed; ++i) {
      if (row[i] >= 0 && lane == 0) {
        items[i]->address[0] = rows + row[i] * in.row_bytes;
      }
      num_own[i] = row[i] >= 0 ? 1 : 0;
    }
    return;
  }
  int mine[kDescribed];
  Wide weight[kDescribed];
  look_up_pairs(in.pair_row, in.num_topk, in.weights, row, mine, weight);
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    const unsigned int mask = __ballot_sync(kFullWarp, mine[i] >= 0);
    if (mine[i] >= 0) {
      const int term = __popc(mask & lanes_before());
      items[i]->address[term] = rows + mine[i] * in.row_bytes;
      items[i]->weight[term] = weight[i];
    }
    num_own[i] = __popc(mask);
  }
}

// What the tokens of a peer need from this rank: compact rows from `first` on.
template <typename Wide>
__device__ void describe_for_peer(const CombineInput& in, int64_t first, int count, Item<Wide>* (&items)[kDescribed]) {
  int64_t row[kDescribed];
  int num_own[kDescribed];
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    row[i] = i < count ? first + i : -1;
  }
  describe_own(in, row, items, num_own);
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    if (i < count && lane_idx() == 0) {
      items[i]->count = items[i]->num_own = num_own[i];
      items[i]->peers_before = 0;
      items[i]->is_lost = false;
    }
  }
}

// What own tokens, from `first` on, need from all ranks.
template <typename Wide>
__device__ void describe_at_home(const World& world, const CombineInput& in, const Turn& turn, unsigned int lost,
                                 int64_t first, int count, Item<Wide>* (&items)[kDescribed]) {
  const int lane = lane_idx();
  int row[kDescribed];
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    row[i] = i < count && lane < world.size ? in.token_row[(first + i) * world.size + lane] : -1;
  }
  bool is_lost[kDescribed];
  int64_t own_row[kDescribed];
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    is_lost[i] = __any_sync(kFullWarp, row[i] >= 0 && (lost >> lane & 1) != 0);
    row[i] = is_lost[i] ? -1 : row[i];
    own_row[i] = __shfl_sync(kFullWarp, row[i], world.rank);
  }
  int num_own[kDescribed];
  describe_own(in, own_row, items, num_own);
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    const bool is_peers = row[i] >= 0 && lane != world.rank;
    const unsigned int peers = __ballot_sync(kFullWarp, is_peers);
    if (is_peers) {
      items[i]->address[num_own[i] + __popc(peers & lanes_before())] =
          reinterpret_cast<uint64_t>(peer_row(world, in, turn, lane, row[i]));
    }
    if (i < count && lane == 0) {
      items[i]->count = num_own[i] + __popc(peers);
      items[i]->num_own = num_own[i];
      items[i]->is_lost = is_lost[i];
      items[i]->peers_before = __popc(peers & ((1u << world.rank) - 1));
    }
  }
}

// What a row without own terms begins with.
__device__ uint4 poison_or_zero(const CombineInput& in, bool is_lost) {
  const uint32_t low = static_cast<uint32_t>(in.poison), high = static_cast<uint32_t>(in.poison >> 32);
  return is_lost ? make_uint4(low, high, low, high) : make_uint4(0, 0, 0, 0);
}

// What an output row is the sum of, as all columns of it share it.
struct RowTerms {
  int num_own;
  int num_peers;
  int peers_before;
  bool is_lost;
  const char* bias[2];
};

// By a thread that adds: kCount columns of an output row, the first of them `at` bytes into the piece at `offset`. The
// own sum comes first; one accumulator serves both sums.
template <int kCount, typename Elem, typename Wide>
__device__ void add_columns(const Team<Wide>& team, const CombineInput& in, const RowTerms& row, const Item<Wide>& item,
                            char* row_out, int64_t offset, int at) {
  using Math = RowMath<Elem>;
  constexpr int kStep = kTeam * 512;
  Wide total[kCount][Math::kElems];
  uint4 out[kCount];
  auto terms = team.terms();
  // `use(i)` for each column.
  const auto each = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      use(i);
    }
  };
  const auto begin_with_term = [&] {
    const uint32_t term = terms.next() + at;
    each([&](int i) { Math::widen(load_shared_16(term + i * kStep), total[i]); });
  };
  const auto add_term = [&] {
    const uint32_t term = terms.next() + at;
    each([&](int i) { Math::add(total[i], load_shared_16(term + i * kStep)); });
  };
  if (row.num_own == 0) {
    each([&](int i) { out[i] = poison_or_zero(in, row.is_lost); });
  } else if (in.weights != nullptr) {
    const uint32_t first = terms.next() + at;
    const Wide first_weight = item.weight[0];
    each([&](int i) { Math::product_of(load_shared_16(first + i * kStep), first_weight, total[i]); });
#pragma unroll 2
    for (int j = 1; j < row.num_own; ++j) {
      const Wide weight = item.weight[j];
      const uint32_t term = terms.next() + at;
      each([&](int i) { Math::add_product(total[i], load_shared_16(term + i * kStep), weight); });
    }
    each([&](int i) { out[i] = Math::rounded(total[i]); });
  } else if (row.num_own == 1) {
    const uint32_t term = terms.next() + at;
    each([&](int i) { out[i] = load_shared_16(term + i * kStep); });
  } else {
    begin_with_term();
#pragma unroll 2
    for (int j = 1; j < row.num_own; ++j) {
      add_term();
    }
    each([&](int i) { out[i] = Math::rounded(total[i]); });
  }
  // The sum at home: biases, then the ranks ascending. One term is the result as it is; which of two comes first does
  // not matter.
  const bool has_bias = row.bias[0] != nullptr;
  if (!row.is_lost && row.num_peers == 1 && row.num_own > 0 && !has_bias) {
    begin_with_term();
    each([&](int i) { Math::add(total[i], out[i]); });
    each([&](int i) { out[i] = Math::rounded(total[i]); });
  } else if (!row.is_lost && (row.num_peers > 0 || has_bias)) {
    each([&](int i) { Math::begin(total[i]); });
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row.bias[j] != nullptr) {
        each([&](int i) { Math::add(total[i], load_16(row.bias[j] + offset + at + i * kStep)); });
      }
    }
#pragma unroll 1
    for (int j = 0; j <= row.num_peers; ++j) {
      if (j == row.peers_before && row.num_own > 0) {
        each([&](int i) { Math::add(total[i], out[i]); });
      }
      if (j < row.num_peers) {
        add_term();
      }
    }
    each([&](int i) { out[i] = Math::rounded(total[i]); });
  }
  each([&](int i) { store_16(row_out + offset + at + i * kStep, out[i]); });
}

// By the adding warps of a team: adds up output rows [first, end); `out_of(i)` is where row i goes, `bias_of(i, j)` its
// first terms, or null.
template <typename Elem, typename Wide, typename OutOf, typename BiasOf>
__device__ void add_rows(Team<Wide>& team, const CombineInput& in, int64_t first, int64_t end, OutOf out_of,
                         BiasOf bias_of) {
  using Math = RowMath<Elem>;
  constexpr int kStep = kTeam * 512;
  for (int64_t number = first; number < end; ++number) {
    const Item<Wide>& item = team.next_item();
    const int num_terms = item.count;
    const RowTerms row = {item.num_own,
                          num_terms - item.num_own,
                          item.peers_before,
                          item.is_lost,
                          {bias_of(number, 0), bias_of(number, 1)}};
    // Two terms as they are: by far the most frequent sum. Which comes first does not matter.
    const bool is_pair = num_terms == 2 && row.num_own == 1 && in.weights == nullptr && row.bias[0] == nullptr;
    char* out = out_of(number);
    for (int64_t offset = 0; offset < in.row_bytes; offset += team.cut.piece_bytes) {
      const int num_bytes = static_cast<int>(min64(team.cut.piece_bytes, in.row_bytes - offset));
      team.wait_terms(num_terms);
      if (is_pair) {
        auto terms = team.terms();
        const uint32_t one = terms.next(), other = terms.next();
#pragma unroll 2
        for (int at = team.thread() * 16; at < num_bytes; at += kStep) {
          Wide total[Math::kElems];
          Math::widen(load_shared_16(one + at), total);
          Math::add(total, load_shared_16(other + at));
          store_16(out + offset + at, Math::rounded(total));
        }
      } else {
        int at = team.thread() * 16;
        static_assert(kTermColumns == 2, "what is left of a piece is one column");
        for (; at + kStep < num_bytes; at += kTermColumns * kStep) {
          add_columns<kTermColumns, Elem>(team, in, row, item, out, offset, at);
        }
        if (at < num_bytes) {
          add_columns<1, Elem>(team, in, row, item, out, offset, at);
        }
      }
      team.release_terms(num_terms);
    }
    team.release_item();
  }
}

// The output rows of a ticket, of all warps alike: own tokens, or the compact rows that it reduces. None of those where
// more came than the slot need hold; the header tells.
__device__ Span rows_of_ticket(const World& world, const CombineInput& in, const CombineWork& work, bool overflowed) {
  if (work.kind == CombineWork::kHome) {
    return tokens_of_part(world, in, work.chunk, work.part);
  }
  if (overflowed) {
    return {0, 0};
  }
  const int32_t* chunk_rows =
      in.geometry + Geometry::chunk_rows(world.size) + work.source * (kMaxChunks + 1) + work.chunk;
  return part_of(chunk_rows[0], chunk_rows[1], work.part);
}

template <typename Elem>
__global__ void __launch_bounds__(kRingThreads, 1)
    moe_ep_combine_bulk(const __grid_constant__ Call call, const __grid_constant__ CombineInput in, const Cut cut) {
  using Wide = typename RowMath<Elem>::Wide;
  extern __shared__ __align__(128) char shared[];
  __shared__ TeamState<Wide> states[kNumTeams];
  static_assert(kRingBytes + sizeof(states) + 1024 <= 227 * 1024, "shared memory of an SM");
  const World& world = call.world;
  if (is_no_call(world, in)) {
    return;
  }
  const Turn turn = turn_of(world);
  Team<Wide> team(shared, states, cut);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;  // a slot need not hold what came
  __shared__ uint32_t worst_verdict;
  if (threadIdx.x == 0) {
    worst_verdict = kGo;
  }
  const int64_t status = status_of(call, in);
  const bool begun = begin_call(call, turn, status, overflowed), fits = status == kFine;
  LateVerdict late_verdict = {&worst_verdict};
  unsigned int lost = 0;
  const int most = most_chunks(in.geometry, world.size);
  const auto for_peer = [&](int64_t row, int count, auto& items) { describe_for_peer(in, row, count, items); };
  const auto at_home = [&](int64_t token, int count, auto& items) {
    describe_at_home(world, in, turn, lost, token, count, items);
  };
  if (begun && team.looks_up()) {
    team.draw_ticket(world.state);
    for (;;) {
      uint32_t ticket = team.take_ticket(world.state);
      CombineWork work = combine_work(world, in, ticket, most);
      if (work.kind == CombineWork::kNothing) {
        continue;
      }
      if (work.kind != CombineWork::kReduce || !fits) {
        const bool was_known = late_verdict.is_known, goes = late_verdict.ask(call, turn) == kGo;
        lost = was_known || !goes ? lost : lost_ranks(world, turn);
        if (!goes || (work.kind == CombineWork::kHome && !chunk_is_reduced(world, turn, work.chunk))) {
          ticket = kNoTicket;
          work.kind = CombineWork::kEnd;
        }
      }
      team.hand_on(ticket);
      if (work.kind == CombineWork::kEnd) {
        break;
      }
      const Span span = rows_of_ticket(world, in, work, overflowed);
      if (work.kind == CombineWork::kHome) {
        team.look_up(in.row_bytes, span.first, span.first + span.count, at_home);
      } else if (in.expert_major) {
        team.look_up(in.row_bytes, span.first, span.first + span.count, for_peer);
      } else {
        team.pass_by(in.row_bytes, span.count);
      }
    }
  } else if (begun && team.fetches()) {
    for (;;) {
      const uint32_t ticket = team.get_ticket();
      const CombineWork work = combine_work(world, in, ticket, most);
      if (ticket == kNoTicket || work.kind == CombineWork::kEnd) {
        break;
      }
      const Span span = rows_of_ticket(world, in, work, overflowed);
      if (work.kind == CombineWork::kHome) {
        fence_copy_engine();
        team.fetch(in.row_bytes, span.count);
      } else if (in.expert_major) {
        team.fetch(in.row_bytes, span.count);
      } else {
        team.fetch_rows(in.rows, in.row_bytes, span.first, span.first + span.count);
      }
      team.release_ticket();
    }
  } else if (begun) {
    for (;;) {
      const uint32_t ticket = team.get_ticket();
      const CombineWork work = combine_work(world, in, ticket, most);
      if (ticket == kNoTicket || work.kind == CombineWork::kEnd) {
        break;
      }
      const bool is_home = work.kind == CombineWork::kHome, is_copied = !is_home && !in.expert_major;
      team.begin_rows(team.sends() == is_copied);
      const Span span = rows_of_ticket(world, in, work, overflowed);
      const int64_t end = span.first + span.count;
      char* staging =
          slot_of(world, world.rank, turn) - staging_shift(in, world.size, world.rank, work.source) * in.row_bytes;
      if (!team.sends()) {
        if (is_home) {
          add_rows<Elem>(
              team, in, span.first, end, [&](int64_t token) { return in.y + token * in.row_bytes; },
              [&](int64_t token, int i) {
                return in.bias[i] == nullptr ? nullptr : in.bias[i] + token * in.row_bytes;
              });
        } else if (!is_copied) {
          add_rows<Elem>(
              team, in, span.first, end, [&](int64_t row) { return staging + row * in.row_bytes; },
              [](int64_t, int) -> const char* { return nullptr; });
        }
        team.pass_rows();
      } else {
        if (is_copied) {
          team.copy_rows(staging, in.row_bytes, span.first, end);
        } else {
          team.pass_rows();
        }
        if (!is_home) {
          if (!is_copied) {
            team.wait_passed(team.num_tickets);
          }
          if (lane_idx() == 0) {
            post_flag(world, turn, work.source, work.chunk * kParts + work.part);
          }
        }
      }
      team.release_ticket();
    }
  }
  __syncthreads();
  const uint32_t verdict = begun ? worst_verdict : static_cast<uint32_t>(kFailed);
  const Output output = {in.y, in.num_tokens * in.row_bytes, in.poison};
  if (is_last_block(world.state)) {
    if (verdict == kGo && in.geometry[Geometry::kNoPlan] != 0) {
      fill_output(output);
    }
    close_call(call, turn, verdict, &output, 1, in.is_registered);
  }
}

#else

template <typename Elem>
__global__ void moe_ep_combine_bulk(const __grid_constant__ Call, const __grid_constant__ CombineInput, const Cut) {}

#endif

}  // namespace

void launch_combine_bulk(const Call& call, const CombineInput& input, RowKind kind, int num_sms, cudaStream_t stream) {
  // A slot of a token brings one term at most: a row of this rank's, or the sum of the rank that has it. But where a
  // slot stands for a row of the node (backend internode), a token has one, and still goes to any number of ranks.
  const int size = call.world.size, num_topk = input.num_topk;
  const int max_terms = input.expert_major && num_topk > size ? num_topk : size;
  const double usual_terms = (input.expert_major ? usual_slots(num_topk, size) : 1) + usual_peers(num_topk, size);
  for_kind(kind, [&](auto elem) {
    constexpr auto kernel = moe_ep_combine_bulk<decltype(elem)>;
    allow_shared_memory<kernel>(kRingBytes, "combine: the shared memory of the rings");
    kernel<<<num_sms, kRingThreads, kRingBytes, stream>>>(call, with_lead(input, call.world, tickets_in_hand(num_sms)),
                                                          cut_of(input.row_bytes, max_terms, usual_terms));
  });
  check_cuda(cudaGetLastError(), "combine: the launch");
}

}  // namespace moe_ep
