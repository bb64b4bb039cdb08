#include "common/row_math.cuh"
#include "common/shared_memory.h"
#include "intranode/move.cuh"
#include "intranode/term_ring.cuh"

// The backward of a weighted combine through shared memory, sm_90 and later: out[row] = x * weight[row] for each place
// of a token, and grad_weights[row] = <x, made_rows[row]>. The terms of a compact row are the row that came, x, and
// behind it what the experts had made, row by row.

namespace moe_ep {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Term 0 is x; term 1 + n is made row number n, in slot order. Place and weight number n are those of row n. What is
// fetched is x alone where no gradient of the weights is wanted, and nothing where nobody wants the row.

// By a whole warp: the row of token number i comes from `x[i]` and goes to the places of compact row `row[i]` (-1:
// none) and, where `staged` has bit i, to staging.
template <typename Wide>
__device__ void describe_rows(const MoveInput& in, const MoveWeights& w, const char* const (&x)[kDescribed],
                              const int64_t (&row)[kDescribed], unsigned int staged, int count,
                              Item<Wide>* (&items)[kDescribed]) {
  const int lane = lane_idx();
  int mine[kDescribed];
  Wide weight[kDescribed];
  look_up_pairs(in.pair_row, in.num_topk, w.weights, row, mine, weight);
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    const unsigned int mask = __ballot_sync(kFullWarp, mine[i] >= 0);
    if (mine[i] >= 0) {
      const int number = __popc(mask & lanes_before());
      items[i]->place[number] = mine[i];
      items[i]->weight[number] = weight[i];
      items[i]->address[1 + number] = reinterpret_cast<uint64_t>(w.rows) + mine[i] * in.rows[0].row_bytes;
    }
    if (lane == 0 && i < count) {
      const int num_places = __popc(mask);
      const bool is_staged = (staged >> i & 1) != 0;
      items[i]->address[0] = reinterpret_cast<uint64_t>(x[i]);
      items[i]->num_own = num_places;
      items[i]->is_staged = is_staged;
      items[i]->count = num_places == 0 && !is_staged ? 0 : w.rows == nullptr ? 1 : 1 + num_places;
    }
  }
}

// Compact rows from `first` on, which `source` sent.
template <typename Wide>
__device__ void describe_pulled(const MoveInput& in, const MoveWeights& w, const Place& source, int64_t first,
                                int count, Item<Wide>* (&items)[kDescribed]) {
  const char* x[kDescribed];
  int64_t row[kDescribed];
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    row[i] = i < count ? first + i : -1;
    x[i] = source.rows + (i < count ? in.recv_token[first + i] : 0) * source.stride_bytes;
  }
  describe_rows(in, w, x, row, 0, count, items);
}

// Own tokens from `first` on.
template <typename Wide>
__device__ void describe_tokens(const World& world, const MoveInput& in, const MoveWeights& w, bool overflowed,
                                int64_t first, int count, Item<Wide>* (&items)[kDescribed]) {
  const int lane = lane_idx();
  int rank_row[kDescribed];
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    rank_row[i] = i < count && lane < world.size ? in.token_row[(first + i) * world.size + lane] : -1;
  }
  const char* x[kDescribed];
  int64_t row[kDescribed];
  unsigned int staged = 0;
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    const int own = __shfl_sync(kFullWarp, rank_row[i], world.rank);
    row[i] = overflowed ? -1 : own;
    x[i] = in.rows[0].x + (first + i) * in.rows[0].stride_bytes;
    staged |= __any_sync(kFullWarp, lane != world.rank && rank_row[i] >= 0) ? 1u << i : 0u;
  }
  describe_rows(in, w, x, row, staged, count, items);
}

constexpr int kDots = 4;  // that are added up over a warp together, since a step of that takes a while

// By a whole warp: the sums of each value over all lanes; lane `first` + k gets that of value k, the others 0. `first`
// is a multiple of kDots.
template <typename Wide>
__device__ Wide spread_sums(const Wide (&values)[kDots], int first) {
  static_assert(kDots == 4, "halves, then quarters of the warp");
  const int lane = lane_idx();
  const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
  const Wide low = (upper ? values[2] : values[0]) + __shfl_xor_sync(kFullWarp, upper ? values[0] : values[2], 16);
  const Wide high = (upper ? values[3] : values[1]) + __shfl_xor_sync(kFullWarp, upper ? values[1] : values[3], 16);
  Wide sum = (odd ? high : low) + __shfl_xor_sync(kFullWarp, odd ? low : high, 8);
  for (int step = 4; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, step);
  }
  const Wide mine = __shfl_sync(kFullWarp, sum, lane % kDots * 8);
  return lane / kDots == first / kDots ? mine : Wide(0);
}

// By the adding warps of a team: rows [first, end) of the source. `staging` is where row 0 lies there, for those that
// are staged.
template <typename Elem, typename Wide>
__device__ void weigh_rows(Team<Wide>& team, const MoveInput& in, const MoveWeights& w, int64_t first, int64_t end,
                           char* staging, Wide (*partial)[kTeam][kMaxTerms]) {
  using Math = RowMath<Elem>;
  constexpr int kStep = kTeam * 512;
  const int64_t row_bytes = in.rows[0].row_bytes;
  for (int64_t row = first; row < end; ++row) {
    const Item<Wide>& item = team.next_item();
    const int num_places = item.num_own;
    const bool is_staged = item.is_staged;
    const int num_terms = item.count;
    Wide dots = 0;  // lane j: of place j, over the pieces so far
    for (int64_t offset = 0; offset < row_bytes && num_terms > 0; offset += team.cut.piece_bytes) {
      const int num_bytes = static_cast<int>(min64(team.cut.piece_bytes, row_bytes - offset));
      team.wait_terms(num_terms);
      // All lanes of a warp take all turns: they add up their parts of a product.
      for (int base = 0; base < num_bytes; base += kTermColumns * kStep) {
        const int at = base + team.thread() * 16;
        auto terms = team.terms();
        const uint32_t x_bytes = terms.next() + at;
        Wide x[kTermColumns][Math::kElems];
#pragma unroll
        for (int i = 0; i < kTermColumns; ++i) {
          const uint4 term = at + i * kStep < num_bytes ? load_shared_16(x_bytes + i * kStep) : make_uint4(0, 0, 0, 0);
          Math::widen(term, x[i]);
          if (is_staged && at + i * kStep < num_bytes) {
            store_16(staging + row * row_bytes + offset + at + i * kStep, term);
          }
        }
#pragma unroll 1
        for (int first_place = 0; first_place < num_places; first_place += kDots) {
          Wide dot[kDots] = {};
#pragma unroll
          for (int k = 0; k < kDots; ++k) {
            const int j = first_place + k;
            if (j < num_places) {
              char* out = in.rows[0].out + item.place[j] * row_bytes + offset + at;
              const uint32_t made = w.rows == nullptr ? 0 : terms.next() + at;
              const Wide weight = item.weight[j];
#pragma unroll
              for (int i = 0; i < kTermColumns; ++i) {
                if (at + i * kStep < num_bytes) {
                  store_16(out + i * kStep, Math::scale(x[i], weight));
                  dot[k] += w.rows == nullptr ? Wide(0) : Math::dot(x[i], load_shared_16(made + i * kStep));
                }
              }
            }
          }
          if (w.rows != nullptr) {
            dots += spread_sums(dot, first_place);
          }
        }
      }
      team.release_terms(num_terms);
    }
    if (w.rows != nullptr) {
      // Who comes to the next row's barrier has read what this row left, so two places are enough.
      Wide(*const parts)[kMaxTerms] = partial[team.num_items % 2];
      parts[team.thread() / 32][lane_idx()] = dots;
      team.sync_adders();
      if (team.thread() < num_places) {
        Wide sum = 0;
        for (int warp = 0; warp < kTeam; ++warp) {
          sum += parts[warp][team.thread()];
        }
        static_cast<Wide*>(w.grad_weights)[item.place[team.thread()]] = sum;
      }
    }
    team.release_item();
  }
}

// The rows of a ticket that come through the rings, of all warps alike: own tokens, or compact rows of a peer. None of
// those where more came than there is room for.
__device__ Span rows_of_ticket(const World& world, const MoveInput& in, const MoveWork& work, bool overflowed) {
  if (work.kind == MoveWork::kOwn) {
    return part_of_tokens(in.num_tokens, work.chunk, work.part);
  }
  return work.kind == MoveWork::kPull && !overflowed ? rows_of(world, in, work) : Span{0, 0};
}

template <typename Elem>
__global__ void __launch_bounds__(kRingThreads, 1)
    moe_ep_move_weighted_bulk(const __grid_constant__ Call call, const __grid_constant__ MoveInput in,
                              const __grid_constant__ MoveWeights w, const Cut cut) {
  using Wide = typename RowMath<Elem>::Wide;
  extern __shared__ __align__(128) char shared[];
  __shared__ TeamState<Wide> states[kNumTeams];
  __shared__ Wide partial[kNumTeams][2][kTeam][kMaxTerms];
  static_assert(kRingBytes + sizeof(states) + sizeof(partial) + 1024 <= 227 * 1024, "shared memory of an SM");
  const World& world = call.world;
  const Turn turn = turn_of(world);
  Team<Wide> team(shared, states, cut);
  __shared__ uint32_t worst_verdict;
  if (threadIdx.x == 0) {
    worst_verdict = kGo;
  }
  const bool begun = begin_call(call, turn), fits = call.header[kStatusWord] == kFine;
  LateVerdict late_verdict = {&worst_verdict};
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
  const int most = most_chunks(in.geometry, world.size);
  if (begun && team.looks_up()) {
    team.draw_ticket(world.state);
    for (;;) {
      uint32_t ticket = team.take_ticket(world.state);
      const MoveWork work = move_work(world, in, ticket, most);
      if (work.kind == MoveWork::kNothing) {
        continue;
      }
      const bool pulls = work.kind == MoveWork::kPull && !overflowed;
      const bool needs_verdict = work.kind != MoveWork::kOwn || !fits;
      if ((needs_verdict && late_verdict.ask(call, turn) != kGo) || (pulls && !chunk_arrived(world, turn, work))) {
        ticket = kNoTicket;
      }
      team.hand_on(ticket);
      if (ticket == kNoTicket || work.kind == MoveWork::kEnd) {
        break;
      }
      const Span span = rows_of_ticket(world, in, work, overflowed);
      if (pulls) {
        const Place source = source_place(world, in, turn, work.source, 0);
        team.look_up(in.rows[0].row_bytes, span.first, span.first + span.count,
                     [&](int64_t row, int count, auto& items) { describe_pulled(in, w, source, row, count, items); });
      } else if (work.kind == MoveWork::kOwn) {
        team.look_up(in.rows[0].row_bytes, span.first, span.first + span.count,
                     [&](int64_t token, int count, auto& items) {
                       describe_tokens(world, in, w, overflowed, token, count, items);
                     });
      }
    }
  } else if (begun && team.fetches()) {
    for (;;) {
      const uint32_t ticket = team.get_ticket();
      const MoveWork work = move_work(world, in, ticket, most);
      if (ticket == kNoTicket || work.kind == MoveWork::kEnd) {
        break;
      }
      if (work.kind == MoveWork::kPull) {
        fence_copy_engine();
      }
      team.fetch(in.rows[0].row_bytes, rows_of_ticket(world, in, work, overflowed).count);
      team.release_ticket();
    }
  } else if (begun) {
    for (;;) {
      const uint32_t ticket = team.get_ticket();
      const MoveWork work = move_work(world, in, ticket, most);
      if (ticket == kNoTicket || work.kind == MoveWork::kEnd) {
        break;
      }
      team.begin_rows(!team.sends());
      if (team.sends()) {
        team.pass_rows();
        if (work.kind == MoveWork::kOwn) {
          team.wait_passed(team.num_tickets);
          post_chunk(world, turn, work);
        }
      } else {
        const Span span = rows_of_ticket(world, in, work, overflowed);
        weigh_rows<Elem>(team, in, w, span.first, span.first + span.count, slot_of(world, world.rank, turn),
                         partial[team.number()]);
        if (work.kind == MoveWork::kPad || work.kind == MoveWork::kTail) {
          const Span padding = padding_of(world, in, work);
          pad_rows(in, padding, team.thread(), kTeam * 32);
          for (int64_t i = team.thread(); w.grad_weights != nullptr && i < padding.count; i += kTeam * 32) {
            static_cast<Wide*>(w.grad_weights)[padding.first + i] = 0;
          }
        }
        team.pass_rows();
      }
      team.release_ticket();
    }
  }
  __syncthreads();
  const uint32_t verdict = begun ? worst_verdict : static_cast<uint32_t>(kFailed);
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

template <typename Elem>
__global__ void moe_ep_move_weighted_bulk(const __grid_constant__ Call, const __grid_constant__ MoveInput,
                                          const __grid_constant__ MoveWeights, const Cut) {}

#endif

}  // namespace

void launch_move_weighted_bulk(const Call& call, const MoveInput& input, const MoveWeights& weights, RowKind kind,
                               int num_sms, cudaStream_t stream) {
  const bool has_made_rows = weights.rows != nullptr;
  const int max_terms = has_made_rows ? 1 + input.num_topk : 1;
  const double usual_terms = has_made_rows ? 1 + usual_slots(input.num_topk, call.world.size) : 1;
  for_kind(kind, [&](auto elem) {
    constexpr auto kernel = moe_ep_move_weighted_bulk<decltype(elem)>;
    allow_shared_memory<kernel>(kRingBytes, "combine backward: the shared memory of the rings");
    kernel<<<num_sms, kRingThreads, kRingBytes, stream>>>(call, with_lead(input, call.world, tickets_in_hand(num_sms)),
                                                          weights,
                                                          cut_of(input.rows[0].row_bytes, max_terms, usual_terms));
  });
  check_cuda(cudaGetLastError(), "combine backward: the launch");
}

}  // namespace moe_ep
