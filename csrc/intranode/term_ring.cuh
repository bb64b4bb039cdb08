// Rows on their way to a sum, sm_90 and later. A team is a warp that looks up, one that fetches, kTeam warps that add,
// and one that sends. The first takes tickets, waits for peers and writes items: what an output row is made of, its
// terms. These come into a ring of stages by the copy engine; the fetching warp runs ahead by the length of that ring,
// the one that looks up by the length of the ring of items, across pieces, rows and tickets. The sending warp posts
// flags, since a flag waits for stores, and copies rows that need no sum.
#pragma once

#include <cmath>

#include "common/bulk_copy.cuh"
#include "exchange/device.cuh"

namespace moe_ep {

constexpr int kRingBytes = 192 * 1024;
constexpr int kMaxPieceBytes = 8192;
constexpr int kMaxRingStages = 32;
constexpr int kMaxTerms = 32;
constexpr uint32_t kNoTicket = ~0u;

constexpr int kTermColumns = 2;  // of 16 bytes that a thread adds up together, so that looking up a term serves both

constexpr int kNumTeams = 3;  // of a block
constexpr int kTeam = 4;
constexpr int kTeamWarps = kTeam + 3;
constexpr int kRingThreads = kNumTeams * kTeamWarps * 32;

// Of all teams of a launch: one that rows come for, one that they are added up of, one that is drawn. More may be
// handed on, up to kTickets; a look-up that then waits for its peer keeps no row waiting.
inline int tickets_in_hand(int num_sms) { return 3 * kNumTeams * num_sms; }

// How rows of some length are cut. All terms of a piece lie in the ring together, and where a row has no more than the
// usual number of them, three quarters of the next piece too. The fewer pieces the better: each costs a team about as
// much as three terms of it.
struct Cut {
  int piece_bytes;  // the last piece of a row may be shorter
  int stage_bytes;
  int num_stages;  // of a team
};

inline Cut cut_of(int64_t row_bytes, int max_terms, double usual_terms) {
  constexpr int kRing = kRingBytes / kNumTeams;
  const int wanted = static_cast<int>(1.75 * usual_terms + 1), needed = max_terms > wanted ? max_terms : wanted;
  const int fit = kRing / (needed < kMaxRingStages ? needed : kMaxRingStages) / 128 * 128;
  const int most = fit < kMaxPieceBytes ? fit : kMaxPieceBytes;
  const int64_t count = (row_bytes + most - 1) / most;
  Cut cut;
  cut.piece_bytes = static_cast<int>((row_bytes / 16 + count - 1) / count * 16);
  cut.stage_bytes = (cut.piece_bytes + 127) / 128 * 128;
  cut.num_stages = kRing / cut.stage_bytes < kMaxRingStages ? kRing / cut.stage_bytes : kMaxRingStages;
  return cut;
}

// Uniform routing: the share of tokens that a rank has any slot of; how many slots of such a token it has; and the
// number of a token's other ranks.
inline double share_of_tokens(int num_topk, int world_size) { return 1 - std::pow(1 - 1.0 / world_size, num_topk); }
inline double usual_slots(int num_topk, int world_size) {
  return num_topk / (world_size * share_of_tokens(num_topk, world_size));
}
inline double usual_peers(int num_topk, int world_size) {
  return (world_size - 1) * share_of_tokens(num_topk, world_size);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What an output row is made of. This rank's own terms are the first; a sum adds them apart, in slot order, and rounds.
// Then come the sums of the peers, ascending, with the own one in its place behind `peers_before` of them.
template <typename Wide>
struct Item {
  int count;
  int num_own;
  int peers_before;
  bool is_lost;          // a rank that the row needs gave its rows up
  bool is_staged;        // the first term goes to staging as it is
  int place[kMaxTerms];  // for whoever needs to know which row a term is
  uint64_t address[kMaxTerms];
  Wide weight[kMaxTerms];
};

constexpr int kTickets = 4;    // that are handed on and not done with
constexpr int kItems = 8;      // the same
constexpr int kDescribed = 4;  // rows that are looked up together, since one look-up waits as long as some
static_assert(kItems >= 2 * kDescribed, "some are looked up while others are worked on");
static_assert(kMaxRingStages <= 32 && kMaxTerms <= 32, "a lane for each");
static_assert(kMaxTerms <= kMaxRingStages, "all terms of a piece lie in the ring together");

// What comes of a ticket begins behind so many items, pieces of output rows, and terms of those pieces.
struct Begin {
  uint32_t ticket;
  uint32_t num_items;
  uint32_t num_pieces;
  uint32_t num_terms;
};

// One team's part of shared memory beside its stages. `full` is for the warps that add or send, one for each piece;
// `empty` for the one that fetches, one for each stage. There are never more pieces on their way than stages. Tickets
// are handed on to all other warps, items to those that fetch and add, in rings of their own.
template <typename Wide>
struct TeamState {
  uint64_t full[kMaxRingStages], empty[kMaxRingStages];
  uint64_t item_full[kItems], item_empty[kItems];
  uint64_t ticket_full[kTickets], ticket_empty[kTickets];
  uint64_t passed[kTickets];  // all that was fetched for the ticket has come, and the sums of it are written
  Begin begins[kTickets];
  Item<Wide> items[kItems];
};

template <typename Wide>
struct Team {
  TeamState<Wide>& state;
  char* stages;
  uint32_t stages_address;
  Cut cut;
  int stage = 0;
  uint32_t parity = 0;
  uint32_t num_items = 0;
  uint32_t num_pieces = 0;
  uint32_t num_terms = 0;    // of the warp that looks up
  uint32_t num_tickets = 0;  // so far; of the other warps those before the one in hand
  uint32_t upcoming = 0;     // ticket, in lane 0 of the warp that looks up: drawn early, since drawing takes a while
  bool had_last = true;      // of a warp that adds or sends: the rows of the last ticket were for it

  // By all threads of a block; `shared` holds kRingBytes.
  __device__ Team(char* shared, TeamState<Wide>* all, const Cut& how) : state(all[number()]), cut(how) {
    stages = shared + static_cast<int64_t>(number()) * how.num_stages * how.stage_bytes;
    stages_address = kept_shared_address(stages);
    if (fetches() && lane_idx() < kMaxRingStages) {
      init_barrier(&state.full[lane_idx()], 1);
      init_barrier(&state.empty[lane_idx()], kTeam);
      if (lane_idx() < kItems) {
        init_barrier(&state.item_full[lane_idx()], 1);
        init_barrier(&state.item_empty[lane_idx()], kTeam + 1);
      }
      if (lane_idx() < kTickets) {
        init_barrier(&state.ticket_full[lane_idx()], 1);
        init_barrier(&state.ticket_empty[lane_idx()], kTeam + 2);
        init_barrier(&state.passed[lane_idx()], kTeam + 1);
      }
    }
    fence_copy_engine();
    __syncthreads();
  }

  __device__ static int number() { return warp_idx() / kTeamWarps; }
  __device__ static bool looks_up() { return warp_idx() % kTeamWarps == kTeam; }
  __device__ static bool fetches() { return warp_idx() % kTeamWarps == kTeam + 1; }
  __device__ static bool sends() { return warp_idx() % kTeamWarps == kTeam + 2; }
  // Of a thread that adds, among those of its team.
  __device__ static int thread() { return warp_idx() % kTeamWarps * 32 + lane_idx(); }

  __device__ uint32_t pieces_of(int64_t row_bytes) const {
    return static_cast<uint32_t>((row_bytes + cut.piece_bytes - 1) / cut.piece_bytes);
  }

  // Behind a piece of `count` terms.
  __device__ void skip_piece(int count) {
    num_pieces += count > 0 ? 1 : 0;
    stage += count;
    if (stage >= cut.num_stages) {
      stage -= cut.num_stages;
      parity ^= 1;
    }
  }

  // By the warp that looks up, before its first ticket.
  __device__ void draw_ticket(State* rank_state) {
    if (lane_idx() == 0) {
      upcoming = atomicAdd(&rank_state->next_ticket, 1u);
    }
  }

  // By the warp that looks up. A team works off its tickets in order, so holding the next one keeps nobody waiting for
  // ever.
  __device__ uint32_t take_ticket(State* rank_state) {
    const uint32_t ticket = __shfl_sync(kFullWarp, upcoming, 0);
    draw_ticket(rank_state);
    return ticket;
  }

  // By the warp that looks up: tells the others. kNoTicket: nothing comes any more.
  __device__ void hand_on(uint32_t ticket) {
    const uint32_t slot = num_tickets % kTickets;
    if (lane_idx() == 0) {
      wait_barrier(&state.ticket_empty[slot], (num_tickets / kTickets + 1) % 2);
      state.begins[slot] = {ticket, num_items, num_pieces, num_terms};
      arrive(&state.ticket_full[slot]);
    }
    ++num_tickets;
    __syncwarp();
  }

  // By the other warps: the same tickets. For each of them a warp says once that it needs the ticket no more, and one
  // that adds or sends says once whether its rows are for it (`begin_rows`), and once that it has passed them.
  __device__ uint32_t get_ticket() {
    const uint32_t slot = num_tickets % kTickets;
    wait_barrier(&state.ticket_full[slot], num_tickets / kTickets % 2);
    const Begin& begin = state.begins[slot];
    num_items = begin.num_items;
    num_pieces = begin.num_pieces;
    stage = static_cast<int>(begin.num_terms % cut.num_stages);
    parity = begin.num_terms / cut.num_stages % 2;
    return begin.ticket;
  }

  // A wait for a piece knows it only by its parity. So a warp that was not there for the rows before waits until those
  // who were have seen them come.
  __device__ void begin_rows(bool for_me) {
    if (for_me && !had_last) {
      wait_passed(num_tickets - 1);
    }
    had_last = for_me;
  }

  __device__ void pass_rows() {
    __syncwarp();
    if (lane_idx() == 0) {
      arrive(&state.passed[num_tickets % kTickets]);
    }
  }

  __device__ void wait_passed(uint32_t number) {
    wait_barrier(&state.passed[number % kTickets], number / kTickets % 2);
  }

  __device__ void release_ticket() {
    __syncwarp();
    if (lane_idx() == 0) {
      arrive(&state.ticket_empty[num_tickets % kTickets]);
    }
    ++num_tickets;
  }

  // By the warp that looks up: says what output rows [first, end) are made of. `describe(row, count, items)`, by all
  // lanes, writes the `count` (at most kDescribed) items from `row` on.
  template <typename Describe>
  __device__ void look_up(int64_t row_bytes, int64_t first, int64_t end, Describe describe) {
    const uint32_t pieces = pieces_of(row_bytes);
    for (int64_t row = first; row < end; row += kDescribed) {
      const int count = static_cast<int>(min64(kDescribed, end - row));
      Item<Wide>* items[kDescribed];
#pragma unroll
      for (int i = 0; i < kDescribed; ++i) {
        const uint32_t number = num_items + i;
        items[i] = &state.items[number % kItems];
        if (i < count) {
          wait_barrier(&state.item_empty[number % kItems], (number / kItems + 1) % 2);
        }
      }
      describe(row, count, items);
      __syncwarp();
      for (int i = 0; i < count; ++i) {
        const int num_here = state.items[(num_items + i) % kItems].count;
        num_pieces += num_here > 0 ? pieces : 0;
        num_terms += num_here * pieces;
      }
      __syncwarp();  // what is handed on may be written over
      if (lane_idx() < count) {
        arrive(&state.item_full[(num_items + lane_idx()) % kItems]);
      }
      num_items += count;
    }
  }

  // By the warp that looks up: rows that come without items.
  __device__ void pass_by(int64_t row_bytes, int64_t num_rows) {
    num_pieces += static_cast<uint32_t>(num_rows) * pieces_of(row_bytes);
    num_terms += static_cast<uint32_t>(num_rows) * pieces_of(row_bytes);
  }

  // By the fetching warp: brings the terms of the next `num_rows` items.
  __device__ void fetch(int64_t row_bytes, int64_t num_rows) {
    for (int64_t i = 0; i < num_rows; ++i) {
      fetch_terms(row_bytes, next_item());
      release_item();
    }
  }

  __device__ uint64_t* full_piece() { return &state.full[num_pieces % kMaxRingStages]; }
  __device__ void wait_piece() { wait_barrier(full_piece(), num_pieces / kMaxRingStages % 2); }

  // Piece by piece, a lane a term; a term is under way as soon as its stage is free, whether or not others wait.
  __device__ void fetch_terms(int64_t row_bytes, const Item<Wide>& item) {
    const int count = item.count, lane = lane_idx();
    for (int64_t offset = 0; offset < row_bytes && count > 0; offset += cut.piece_bytes) {
      const uint32_t num_bytes = static_cast<uint32_t>(min64(cut.piece_bytes, row_bytes - offset));
      const bool wraps = stage + lane >= cut.num_stages;
      const int mine = stage + lane - (wraps ? cut.num_stages : 0);
      const uint32_t mine_parity = parity ^ (wraps ? 0 : 1);
      if (lane == 0) {
        wait_barrier(&state.empty[mine], mine_parity);
        expect_bytes(full_piece(), count * num_bytes);
      }
      __syncwarp();
      bool waits = lane < count;
      for (;;) {
        if (waits && test_barrier(&state.empty[mine], mine_parity)) {
          load_expected(stages + mine * cut.stage_bytes, reinterpret_cast<const char*>(item.address[lane]) + offset,
                        num_bytes, full_piece());
          waits = false;
        }
        const unsigned int waiting = __ballot_sync(kFullWarp, waits);
        if (waiting == 0) {
          break;
        }
        if (lane == __ffs(waiting) - 1) {
          wait_barrier(&state.empty[mine], mine_parity);
        }
        __syncwarp();
      }
      skip_piece(count);
    }
  }

  // By the fetching warp: brings rows [first, end), which lie behind each other from `rows` on, without items.
  __device__ void fetch_rows(const char* rows, int64_t row_bytes, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      for (int64_t offset = 0; offset < row_bytes; offset += cut.piece_bytes) {
        if (lane_idx() == 0) {
          wait_barrier(&state.empty[stage], parity ^ 1);
          load_bulk(stages + stage * cut.stage_bytes, rows + row * row_bytes + offset,
                    static_cast<uint32_t>(min64(cut.piece_bytes, row_bytes - offset)), full_piece());
        }
        skip_piece(1);
      }
    }
    __syncwarp();
  }

  // By the sending warp: copies those rows to where row 0 would lie at `out`, by the copy engine, and passes them; they
  // are written when this returns.
  __device__ void copy_rows(char* out, int64_t row_bytes, int64_t first, int64_t end) {
    int unread = -1;  // stage that may still be read
    if (lane_idx() == 0) {
      for (int64_t row = first; row < end; ++row) {
        for (int64_t offset = 0; offset < row_bytes; offset += cut.piece_bytes) {
          wait_piece();
          store_bulk(out + row * row_bytes + offset, stages + stage * cut.stage_bytes,
                     static_cast<uint32_t>(min64(cut.piece_bytes, row_bytes - offset)));
          commit_stores();
          if (unread >= 0) {
            wait_stores_read<1>();
            arrive(&state.empty[unread], kTeam);
          }
          unread = stage;
          skip_piece(1);
        }
      }
    }
    pass_rows();
    if (lane_idx() == 0 && first < end) {
      wait_stores_read<0>();
      arrive(&state.empty[unread], kTeam);
      wait_stores();
      fence_copy_engine();
    }
    __syncwarp();
  }

  // By the warps that fetch and add: what the next output row is made of, until `release_item`.
  __device__ const Item<Wide>& next_item() {
    const uint32_t slot = num_items % kItems;
    wait_barrier(&state.item_full[slot], num_items / kItems % 2);
    return state.items[slot];
  }

  __device__ void release_item() {
    __syncwarp();
    if (lane_idx() == 0) {
      arrive(&state.item_empty[num_items % kItems]);
    }
    ++num_items;
  }

  // By the adding warps: until the `count` terms of the next piece have come. They stay until `release_terms`.
  __device__ void wait_terms(int count) {
    if (count > 0) {
      wait_piece();
    }
    __syncwarp();
  }

  __device__ void release_terms(int count) {
    __syncwarp();
    if (lane_idx() < count) {
      const int mine = stage + lane_idx();
      arrive(&state.empty[mine - (mine >= cut.num_stages ? cut.num_stages : 0)]);
    }
    skip_piece(count);
  }

  // Goes over the terms of the piece in hand, in their order: where each begins in shared memory.
  struct Terms {
    uint32_t upcoming, begin, end, stage_bytes;

    __device__ uint32_t next() {
      const uint32_t term = upcoming;
      upcoming += stage_bytes;
      upcoming = upcoming == end ? begin : upcoming;
      return term;
    }
  };

  __device__ Terms terms() const {
    const uint32_t begin = stages_address, bytes = cut.stage_bytes;
    return {begin + stage * bytes, begin, begin + cut.num_stages * bytes, bytes};
  }

  // By the adding warps: waits for each other.
  __device__ static void sync_adders() {
    asm volatile("bar.sync %0, %1;" ::"r"(number() + 1), "n"(kTeam * 32) : "memory");
  }
};

// By a whole warp: which row of the experts slot `lane` of each compact row is (-1: none here, or no compact row), and
// its weight where there are weights. All look-ups of a kind are under way together.
template <typename Wide>
__device__ void look_up_pairs(const int32_t* pair_row, int num_topk, const void* weights,
                              const int64_t (&row)[kDescribed], int (&mine)[kDescribed], Wide (&weight)[kDescribed]) {
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    mine[i] = row[i] >= 0 && lane_idx() < num_topk ? pair_row[row[i] * num_topk + lane_idx()] : -1;
  }
#pragma unroll
  for (int i = 0; i < kDescribed; ++i) {
    weight[i] = weights != nullptr && mine[i] >= 0 ? static_cast<const Wide*>(weights)[mine[i]] : Wide(0);
  }
}

__device__ inline unsigned int lanes_before() { return (1u << lane_idx()) - 1; }

#endif

}  // namespace moe_ep
