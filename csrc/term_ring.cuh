// Rows on their way to a sum, sm_90 and later. A team is one warp that fetches and kTeam warps that add. What an output
// row is made of, its terms, comes into a ring of stages by the copy engine; the fetching warp runs ahead by the length
// of the ring, across pieces, rows and tickets.
#pragma once

#include <type_traits>

#include "bulk_copy.cuh"
#include "exchange_device.cuh"

namespace moe_ep {

constexpr int kRingLoads = 4;  // of 16 bytes that a thread takes from a stage
constexpr int kRingBytes = 204 * 1024;
constexpr int kMaxRingStages = 16;
constexpr int kMaxTerms = 32;
constexpr uint32_t kNoTicket = ~0u;

// Teams of a block: as many as its registers serve.
template <int kTeam>
constexpr int kNumTeams = kTeam == 1   ? 7
                          : kTeam == 2 ? 5
                                       : 3;
template <int kTeam>
constexpr int kRingThreads = kNumTeams<kTeam> * (kTeam + 1) * 32;

// How rows of some length are cut: as many pieces as need be, each for a team at once.
struct Cut {
  int piece_bytes;  // the last piece of a row may be shorter
  int stage_bytes;
  int num_stages;  // of a team
};

template <int kTeam>
inline Cut cut_of(int64_t row_bytes) {
  constexpr int64_t kMost = kRingLoads * kTeam * 512;
  const int64_t count = (row_bytes + kMost - 1) / kMost;
  Cut cut;
  cut.piece_bytes = static_cast<int>((row_bytes / 16 + count - 1) / count * 16);
  cut.stage_bytes = (cut.piece_bytes + 127) / 128 * 128;
  const int fit = kRingBytes / kNumTeams<kTeam> / cut.stage_bytes;
  cut.num_stages = fit < kMaxRingStages ? fit : kMaxRingStages;
  return cut;
}

// What serves rows of this length: a warp takes 2 KiB at once.
template <typename Launch>
inline void for_team(int64_t row_bytes, Launch launch) {
  if (row_bytes <= 2048) {
    launch(std::integral_constant<int, 1>());
  } else if (row_bytes <= 4096) {
    launch(std::integral_constant<int, 2>());
  } else {
    launch(std::integral_constant<int, 4>());
  }
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
  int place[kMaxTerms];  // for whoever needs to know which row a term is
  uint64_t address[kMaxTerms];
  Wide weight[kMaxTerms];
};

// One team's part of shared memory beside its stages. `full` is for the warps that add, `empty` for the one that
// fetches. Tickets and items are handed on in rings of their own.
constexpr int kItems = 4;

template <typename Wide>
struct TeamState {
  uint64_t full[kMaxRingStages], empty[kMaxRingStages];
  uint64_t item_full[kItems], item_empty[kItems];
  uint64_t ticket_full[2], ticket_empty[2];
  uint32_t tickets[2];
  Item<Wide> items[kItems];
};

template <int kTeam, typename Wide>
struct Team {
  TeamState<Wide>& state;
  char* stages;
  Cut cut;
  int stage = 0;
  uint32_t parity = 0;
  uint32_t num_items = 0;
  uint32_t num_tickets = 0;

  // By all threads of a block; `shared` holds kRingBytes.
  __device__ Team(char* shared, TeamState<Wide>* all, const Cut& how) : state(all[number()]), cut(how) {
    stages = shared + static_cast<int64_t>(number()) * how.num_stages * how.stage_bytes;
    if (fetches() && lane_idx() < kMaxRingStages) {
      init_barrier(&state.full[lane_idx()], 1);
      init_barrier(&state.empty[lane_idx()], kTeam);
      if (lane_idx() < kItems) {
        init_barrier(&state.item_full[lane_idx()], 1);
        init_barrier(&state.item_empty[lane_idx()], kTeam);
      }
      if (lane_idx() < 2) {
        init_barrier(&state.ticket_full[lane_idx()], 1);
        init_barrier(&state.ticket_empty[lane_idx()], kTeam);
      }
    }
    fence_copy_engine();
    __syncthreads();
  }

  __device__ static int number() { return warp_idx() / (kTeam + 1); }
  __device__ static bool fetches() { return warp_idx() % (kTeam + 1) == kTeam; }
  // Of a thread that adds, among those of its team.
  __device__ static int thread() { return warp_idx() % (kTeam + 1) * 32 + lane_idx(); }

  __device__ void skip_stages(int count) {
    stage += count;
    if (stage >= cut.num_stages) {
      stage -= cut.num_stages;
      parity ^= 1;
    }
  }

  // By the fetching warp: takes a ticket, once there is room to hand it on.
  __device__ uint32_t take_ticket(State* rank_state) {
    wait_barrier(&state.ticket_empty[num_tickets % 2], (num_tickets / 2 + 1) % 2);
    return warp_ticket(rank_state);
  }

  // By the fetching warp: tells the adding warps. kNoTicket: nothing comes any more.
  __device__ void hand_on(uint32_t ticket) {
    const uint32_t slot = num_tickets % 2;
    if (lane_idx() == 0) {
      state.tickets[slot] = ticket;
      arrive(&state.ticket_full[slot]);
    }
    ++num_tickets;
    __syncwarp();
  }

  // By the adding warps: the same tickets.
  __device__ uint32_t get_ticket() {
    const uint32_t slot = num_tickets % 2;
    wait_barrier(&state.ticket_full[slot], num_tickets / 2 % 2);
    const uint32_t ticket = *static_cast<volatile uint32_t*>(&state.tickets[slot]);
    __syncwarp();
    if (lane_idx() == 0) {
      arrive(&state.ticket_empty[slot]);
    }
    ++num_tickets;
    return ticket;
  }

  // By the fetching warp: says what output rows [first, end) are made of (`describe(row, item)`, by all lanes) and
  // brings their terms, piece by piece, a lane a term.
  template <typename Describe>
  __device__ void fetch(int64_t row_bytes, int64_t first, int64_t end, Describe describe) {
    for (int64_t row = first; row < end; ++row) {
      const uint32_t slot = num_items % kItems;
      wait_barrier(&state.item_empty[slot], (num_items / kItems + 1) % 2);
      Item<Wide>& item = state.items[slot];
      const int count = describe(row, item);
      __syncwarp();
      if (lane_idx() == 0) {
        arrive(&state.item_full[slot]);
      }
      ++num_items;
      for (int64_t offset = 0; offset < row_bytes; offset += cut.piece_bytes) {
        const uint32_t num_bytes = static_cast<uint32_t>(min64(cut.piece_bytes, row_bytes - offset));
        for (int begin = 0; begin < count; begin += cut.num_stages) {
          const int batch = min(count - begin, cut.num_stages);
          if (lane_idx() < batch) {
            const bool wraps = stage + lane_idx() >= cut.num_stages;
            const int mine = stage + lane_idx() - (wraps ? cut.num_stages : 0);
            wait_barrier(&state.empty[mine], parity ^ (wraps ? 0 : 1));
            load_bulk(stages + mine * cut.stage_bytes,
                      reinterpret_cast<const char*>(item.address[begin + lane_idx()]) + offset, num_bytes,
                      &state.full[mine]);
          }
          __syncwarp();
          skip_stages(batch);
        }
      }
    }
  }

  // By the adding warps: what the next output row is made of, until `release`.
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

  // By the adding warps: takes the next piece, of which this thread has 16 bytes number i (`use(i, bytes)`). Behind the
  // end of a piece there are bytes of something else, which may be added but not stored.
  template <typename Use>
  __device__ void take(Use use) {
    wait_barrier(&state.full[stage], parity);
    const uint4* piece = reinterpret_cast<const uint4*>(stages + stage * cut.stage_bytes);
#pragma unroll
    for (int i = 0; i < kRingLoads; ++i) {
      const int at = i * kTeam * 32 + thread();
      use(i, at * 16 < cut.stage_bytes ? piece[at] : make_uint4(0, 0, 0, 0));
    }
    __syncwarp();
    if (lane_idx() == 0) {
      arrive(&state.empty[stage]);
    }
    skip_stages(1);
  }

  // Where this thread's 16 bytes number i of a piece lie in the row.
  __device__ int64_t place(int64_t offset, int i) const { return offset + (i * kTeam * 32 + thread()) * 16; }

  // By the adding warps: waits for each other.
  __device__ static void sync_adders() {
    if constexpr (kTeam == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(number() + 1), "n"(kTeam * 32) : "memory");
    }
  }
};

#endif

}  // namespace moe_ep
