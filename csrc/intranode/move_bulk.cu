#include <algorithm>
#include <type_traits>

#include "common/bulk_copy.cuh"
#include "common/shared_memory.h"
#include "intranode/move.cuh"

// Rows through shared memory by the copy engine, sm_90 and later. A worker is a few warps with a ring of stages. One
// plans: it takes tickets, waits for peers, and looks up what goes where. One loads rows into the ring. The others
// store them, a batch each in turn, so that one can wait for its stores and post a flag while the next goes on.

namespace moe_ep {
namespace {

constexpr int kBatches = 3;  // of a worker, with a warp each that stores
constexpr int kRoles = 2 + kBatches;
constexpr int kMaxStages = 16;
constexpr int kMaxPieceBytes = 16384;
constexpr int kLongRowBytes = 8192;     // longer rows have two workers a block, shorter ones three
constexpr int kRingBytes = 200 * 1024;  // of a block
constexpr int kBatchRows = 4;

// How rows are cut. A stage holds a piece.
struct Pieces {
  int count;      // of a row
  int num_bytes;  // of a piece; the last one may be shorter
  int stage_bytes;
  int num_stages;  // of a worker
  int num_places;  // that a row may have
};

Pieces pieces_of(const MoveInput& in, int num_workers) {
  const int64_t row_bytes = in.rows[0].row_bytes;
  Pieces pieces;
  pieces.count = static_cast<int>((row_bytes + kMaxPieceBytes - 1) / kMaxPieceBytes);
  pieces.num_bytes = static_cast<int>((row_bytes / 16 + pieces.count - 1) / pieces.count * 16);
  pieces.stage_bytes = (pieces.num_bytes + 127) / 128 * 128;
  pieces.num_stages = std::min(kMaxStages, kRingBytes / num_workers / pieces.stage_bytes);
  pieces.num_places = in.expert_major ? in.num_topk : 1;
  return pieces;
}

// Of a worker: those whose rows are in its batches, and one that is drawn.
int tickets_in_hand(int64_t num_tokens) {
  const int64_t ticket_tokens = chunk_tokens(num_tokens) / kParts;
  return static_cast<int>((kBatches * kBatchRows + ticket_tokens - 1) / ticket_tokens) + 1;
}

int shared_bytes(const Pieces& pieces, int num_workers) {
  const int place_bytes = kBatches * kBatchRows * pieces.num_places * static_cast<int>(sizeof(int32_t));
  return num_workers * (pieces.num_stages * pieces.stage_bytes + place_bytes);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

constexpr int kStoresBehind = 2;  // pieces whose stores may still read their stages

// Rows on their way, from the warp that plans to those that load and store.
struct Batch {
  int count;              // of rows; -1 says that nothing comes any more
  uint32_t first_piece;   // number of it among all that the worker moves
  MoveWork post;          // whose flag is posted behind the rows of all its batches, where its kind is kOwn
  int publication;        // where `num_unwritten` has that ticket
  Place from[kRowKinds];  // rows of each kind
  bool from_peer;
  int token[kBatchRows];  // -1 for a row that nobody wants
  bool is_staged[kBatchRows];
};

struct WorkerState {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t batch_full[kBatches], batch_empty[kBatches];
  uint64_t turn[kBatches];  // all that lies in the ring before the batch has come
  // Of a ticket whose flag is to be posted: batches that are not written yet. Every such ticket has a batch of its own,
  // so no more of them are under way than batches.
  uint32_t num_unwritten[kBatches];
  Batch batches[kBatches];
};

// Goes round a ring of `count` places.
struct Cursor {
  int count;
  int at = 0;
  uint32_t parity = 0;

  __device__ static Cursor at_number(int count, uint32_t number) {
    return {count, static_cast<int>(number % count), number / count % 2};
  }

  __device__ void next() {
    if (++at == count) {
      at = 0;
      parity ^= 1;
    }
  }
};

struct Worker {
  WorkerState& state;
  char* stages;
  int32_t* places;  // [kBatches, kBatchRows, num_places]
  const Pieces& pieces;

  __device__ int32_t* places_of_batch(int batch) const { return places + batch * kBatchRows * pieces.num_places; }
  __device__ char* stage(int number) const { return stages + number * pieces.stage_bytes; }

  __device__ uint32_t bytes_of(const MoveInput& in, int piece) const {
    const int64_t offset = static_cast<int64_t>(piece) * pieces.num_bytes;
    return static_cast<uint32_t>(min64(pieces.num_bytes, in.rows[0].row_bytes - offset));
  }
};

// -- planning

// By a whole warp, for at most kBatchRows rows: lane i knows the token and the compact row of row i, -1 for none.
// Returns how many are wanted at all.
__device__ int plan_rows(const Worker& worker, const MoveInput& in, int slot, int count, int token, int compact,
                         bool is_staged) {
  const int lane = lane_idx(), width = worker.pieces.num_places;
  Batch& batch = worker.state.batches[slot];
  const bool is_wanted = lane < count && (compact >= 0 || is_staged);
  if (lane < count) {
    batch.token[lane] = is_wanted ? token : -1;
    batch.is_staged[lane] = is_staged;
  }
  int32_t* places = worker.places_of_batch(slot);
  for (int base = 0; base < count * width; base += 32) {
    const int i = base + lane, row = min(i / width, count - 1);
    const int64_t of_row = __shfl_sync(kFullWarp, compact, row);
    if (i < count * width) {
      int place = -1;
      if (of_row >= 0 && in.expert_major) {
        place = in.pair_row[of_row * in.num_topk + i % width];
      } else if (of_row < in.num_rows) {
        place = static_cast<int>(of_row);
      }
      places[i] = place;
    }
  }
  return __popc(__ballot_sync(kFullWarp, is_wanted));
}

// By a whole warp: takes tickets until there are none.
__device__ void plan(const Worker& worker, const Call& call, const MoveInput& in, const Turn& turn, int most,
                     bool overflowed, uint32_t* worst_verdict) {
  const World& world = call.world;
  const int lane = lane_idx();
  const bool fits = call.header[kStatusWord] == kFine;
  LateVerdict verdict = {worst_verdict};
  const bool posts = world.size > 1 && !in.is_registered;
  Cursor cursor = {kBatches};
  uint32_t num_pieces = 0;
  int publication = 0;
  // Rows from `first` on, as batch number `number` of the ticket's `num_batches`.
  const auto put = [&](const MoveWork& work, int64_t first, int count, int number, int num_batches) {
    wait_barrier(&worker.state.batch_empty[cursor.at], cursor.parity ^ 1);
    Batch& batch = worker.state.batches[cursor.at];
    const bool is_own = work.kind == MoveWork::kOwn;
    int token = -1, compact = -1;
    bool is_staged = false;
    if (lane < count) {
      if (is_own) {
        const OwnToken own = own_token(world, in, first + lane);
        token = static_cast<int>(first) + lane;
        compact = overflowed ? -1 : own.compact_row;
        is_staged = own.is_wanted && !in.is_registered;
      } else {
        token = in.recv_token[first + lane];
        compact = static_cast<int>(first) + lane;
      }
    }
    const int num_wanted = plan_rows(worker, in, cursor.at, max(count, 0), token, compact, is_staged);
    if (lane < kRowKinds) {
      batch.from[lane] = is_own || count < 0 ? Place{in.rows[lane].x, in.rows[lane].stride_bytes}
                                             : source_place(world, in, turn, work.source, lane);
    }
    if (lane == 0) {
      batch.count = count;
      batch.first_piece = num_pieces;
      batch.post = work;
      batch.post.kind = is_own && posts ? MoveWork::kOwn : MoveWork::kNothing;
      batch.publication = publication;
      if (batch.post.kind == MoveWork::kOwn && number == 0) {
        worker.state.num_unwritten[publication] = num_batches;
      }
      batch.from_peer = !is_own;
    }
    __syncwarp();
    if (lane == 0) {
      arrive(&worker.state.batch_full[cursor.at]);
    }
    cursor.next();
    num_pieces += num_wanted * worker.pieces.count;
  };
  // Drawn early, since drawing takes a while. Tickets are worked off in order, so holding one keeps nobody waiting.
  const auto draw = [&]() { return lane == 0 ? atomicAdd(&world.state->next_ticket, 1u) : 0u; };
  uint32_t upcoming = draw();
  for (;;) {
    const uint32_t ticket = __shfl_sync(kFullWarp, upcoming, 0);
    upcoming = draw();
    const MoveWork work = move_work(world, in, ticket, most);
    if (work.kind == MoveWork::kNothing) {  // a pull of the lead: publishing goes on without the verdict
      continue;
    }
    const bool needs_verdict = work.kind != MoveWork::kOwn || !fits;
    if ((needs_verdict && verdict.ask(call, turn) != kGo) || work.kind == MoveWork::kEnd) {
      for (int i = 0; i < kBatches; ++i) {
        put(work, 0, -1, 0, 0);
      }
      return;
    }
    if (work.kind == MoveWork::kPad || work.kind == MoveWork::kTail) {
      pad_rows(in, padding_of(world, in, work), lane, 32);
    }
    const bool pulls = work.kind == MoveWork::kPull && !overflowed;
    if (work.kind != MoveWork::kOwn && !pulls) {
      continue;
    }
    const Span span = pulls ? rows_of(world, in, work) : part_of_tokens(in.num_tokens, work.chunk, work.part);
    if (pulls && (span.count == 0 || !chunk_arrived(world, turn, work))) {
      continue;
    }
    // One for no rows: their flag is waited for.
    const int num_batches = max(1, static_cast<int>((span.count + kBatchRows - 1) / kBatchRows));
    for (int i = 0; i < num_batches; ++i) {
      const int before = i * kBatchRows;
      put(work, span.first + before, static_cast<int>(min64(kBatchRows, span.count - before)), i, num_batches);
    }
    publication = (publication + (work.kind == MoveWork::kOwn ? 1 : 0)) % kBatches;
  }
}

// -- loading and storing

__device__ void load(const Worker& worker, const MoveInput& in) {
  const Pieces& pieces = worker.pieces;
  Cursor cursor = {kBatches}, ring = {pieces.num_stages};
  for (;; cursor.next()) {
    wait_barrier(&worker.state.batch_full[cursor.at], cursor.parity);
    const Batch& batch = worker.state.batches[cursor.at];
    const int count = batch.count;
    __syncwarp();  // lane 0 gives the batch back
    if (count < 0) {
      return;
    }
    if (lane_idx() == 0) {
      if (batch.from_peer) {
        fence_copy_engine();
      }
      for (int i = 0; i < count; ++i) {
        const int64_t token = batch.token[i];
        if (token < 0) {
          continue;
        }
        const char* row = batch.from[0].rows + token * batch.from[0].stride_bytes;
        for (int piece = 0; piece < pieces.count; ++piece, ring.next()) {
          const uint32_t num_bytes = worker.bytes_of(in, piece);
          uint64_t* full = &worker.state.full[ring.at];
          wait_barrier(&worker.state.empty[ring.at], ring.parity ^ 1);
          load_bulk(worker.stage(ring.at), row + piece * pieces.num_bytes, num_bytes, full);
        }
      }
      arrive(&worker.state.batch_empty[cursor.at]);
    }
    __syncwarp();
  }
}

// One less, and what is left: whoever gets 0 sees what all others wrote before they counted.
__device__ uint32_t count_down(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(counter)), "r"(~0u)
               : "memory");
  return before - 1;
}

// By one thread: what lies in a stage to every place of its row.
__device__ void store_piece(const Rows& rows, const char* from, uint32_t num_bytes, int64_t offset,
                            const int32_t* places, int num_places, char* staging, int64_t token) {
  for (int i = 0; i < num_places; ++i) {
    if (places[i] >= 0) {
      store_bulk(rows.out + places[i] * rows.row_bytes + offset, from, num_bytes);
    }
  }
  if (staging != nullptr) {
    store_bulk(staging + token * rows.row_bytes + offset, from, num_bytes);
  }
}

// By a whole warp: the scales of a batch, to all places of their rows.
__device__ void copy_scales(const Batch& batch, const Rows& scales, const int32_t* places, int num_places,
                            char* staging) {
  const int num_words = static_cast<int>(scales.row_bytes / 16);
  for (int i = lane_idx(); i < batch.count * num_words; i += 32) {
    const int row = i / num_words, at = i % num_words * 16;
    const int64_t token = batch.token[row];
    if (token < 0) {
      continue;
    }
    const uint4 word = load_16(batch.from[1].rows + token * batch.from[1].stride_bytes + at);
    for (int j = 0; j < num_places; ++j) {
      const int64_t place = places[row * num_places + j];
      if (place >= 0) {
        store_16(scales.out + place * scales.row_bytes + at, word);
      }
    }
    if (batch.is_staged[row]) {
      store_16(staging + token * scales.row_bytes + at, word);
    }
  }
}

// By a whole warp: the batches in `slot`. A wait for a stage knows the use of it only by its parity, so a batch begins
// when the one before has seen all its pieces come.
__device__ void store(const Worker& worker, const World& world, const MoveInput& in, const Turn& turn, int slot) {
  const Pieces& pieces = worker.pieces;
  char* const staging = const_cast<char*>(staging_place(world, in, turn, world.rank, 0).rows);
  char* const scale_staging = const_cast<char*>(staging_place(world, in, turn, world.rank, 1).rows);
  const Batch& batch = worker.state.batches[slot];
  const int32_t* const all_places = worker.places_of_batch(slot);
  for (uint32_t parity = 0;; parity ^= 1) {
    wait_barrier(&worker.state.batch_full[slot], parity);
    const int count = batch.count;
    if (count < 0) {
      return;
    }
    const bool posts = batch.post.kind == MoveWork::kOwn;
    if (in.rows[1].row_bytes > 0) {
      copy_scales(batch, in.rows[1], all_places, pieces.num_places, scale_staging);
    }
    if (lane_idx() == 0) {
      wait_barrier(&worker.state.turn[slot], slot == 0 ? parity ^ 1 : parity);
      Cursor ring = Cursor::at_number(pieces.num_stages, batch.first_piece), read = ring;
      int num_unread = 0;
      const auto release = [&]() {
        arrive(&worker.state.empty[read.at]);
        read.next();
        --num_unread;
      };
      for (int i = 0; i < count; ++i) {
        const int64_t token = batch.token[i];
        if (token < 0) {
          continue;
        }
        const int32_t* places = all_places + i * pieces.num_places;
        const bool is_staged = batch.is_staged[i];
        for (int piece = 0; piece < pieces.count; ++piece, ring.next()) {
          const char* from = worker.stage(ring.at);
          wait_barrier(&worker.state.full[ring.at], ring.parity);
          store_piece(in.rows[0], from, worker.bytes_of(in, piece), static_cast<int64_t>(piece) * pieces.num_bytes,
                      places, pieces.num_places, is_staged ? staging : nullptr, token);
          commit_stores();
          if (++num_unread > kStoresBehind) {
            wait_stores_read<kStoresBehind>();
            release();
          }
        }
      }
      arrive(&worker.state.turn[(slot + 1) % kBatches]);
      wait_stores_read<0>();
      while (num_unread > 0) {
        release();
      }
      if (posts) {
        wait_stores();
        fence_copy_engine();
      }
    }
    if (posts) {
      __syncwarp();  // for the scales
      const bool is_last = lane_idx() == 0 && count_down(&worker.state.num_unwritten[batch.publication]) == 0;
      if (__any_sync(kFullWarp, is_last)) {
        post_chunk(world, turn, batch.post);
      }
    }
    __syncwarp();
    if (lane_idx() == 0) {
      arrive(&worker.state.batch_empty[slot]);
    }
  }
}

template <int kWorkers>
__global__ void __launch_bounds__(kWorkers * kRoles * 32, 1)
    moe_ep_move_bulk(const __grid_constant__ Call call, const __grid_constant__ MoveInput in,
                     const __grid_constant__ Pieces pieces) {
  extern __shared__ __align__(128) char shared[];
  __shared__ WorkerState states[kWorkers];
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const int number = warp_idx() / kRoles, role = warp_idx() % kRoles;
  const int worker_bytes = pieces.num_stages * pieces.stage_bytes;
  const Worker worker = {
      states[number], shared + number * worker_bytes,
      reinterpret_cast<int32_t*>(shared + kWorkers * worker_bytes) + number * kBatches * kBatchRows * pieces.num_places,
      pieces};
  if (role == 0 && lane_idx() < kMaxStages) {
    init_barrier(&worker.state.full[lane_idx()]);
    init_barrier(&worker.state.empty[lane_idx()]);
    if (lane_idx() < kBatches) {
      init_barrier(&worker.state.batch_full[lane_idx()]);
      init_barrier(&worker.state.batch_empty[lane_idx()], 2);
      init_barrier(&worker.state.turn[lane_idx()]);
    }
  }
  fence_copy_engine();
  __shared__ uint32_t worst_verdict;
  if (threadIdx.x == 0) {
    worst_verdict = kGo;
  }
  const bool begun = begin_call(call, turn);  // synchronises the block
  if (begun) {
    if (role == 0) {
      plan(worker, call, in, turn, most_chunks(in.geometry, world.size), in.geometry[Geometry::kOverflowed] != 0,
           &worst_verdict);
    } else if (role == 1) {
      load(worker, in);
    } else {
      store(worker, world, in, turn, role - 2);
      if (lane_idx() == 0) {
        wait_stores();
        fence_copy_engine();
      }
      __syncwarp();
    }
  }
  __syncthreads();
  end_move(call, in, turn, begun ? worst_verdict : static_cast<uint32_t>(kFailed));
}

#else

template <int kWorkers>
__global__ void moe_ep_move_bulk(const __grid_constant__ Call, const __grid_constant__ MoveInput,
                                 const __grid_constant__ Pieces) {}

#endif

}  // namespace

bool has_bulk_copies() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, moe_ep_move_bulk<2>), "dispatch: the kernel's attributes");
  return attributes.ptxVersion >= 90;
}

void launch_move_bulk(const Call& call, const MoveInput& input, int num_sms, cudaStream_t stream) {
  const auto launch = [&](auto workers) {
    constexpr int kWorkers = decltype(workers)::value;
    const Pieces pieces = pieces_of(input, kWorkers);
    const int num_bytes = shared_bytes(pieces, kWorkers);
    const int in_hand = num_sms * kWorkers * tickets_in_hand(input.num_tokens);
    constexpr auto kernel = moe_ep_move_bulk<kWorkers>;
    allow_shared_memory<kernel>(num_bytes, "dispatch: the shared memory of the rings");
    kernel<<<num_sms, kWorkers * kRoles * 32, num_bytes, stream>>>(call, with_lead(input, call.world, in_hand), pieces);
  };
  if (input.rows[0].row_bytes > kLongRowBytes) {
    launch(std::integral_constant<int, 2>());
  } else {
    launch(std::integral_constant<int, 3>());
  }
  check_cuda(cudaGetLastError(), "dispatch: the launch");
}

}  // namespace moe_ep
