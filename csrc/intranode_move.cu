#include <algorithm>

#include "bulk_copy.cuh"
#include "intranode_move.cuh"
#include "shared_memory.h"

namespace moe_ep {
namespace {

// By every block, last thing.
__device__ void end_move(const Call& call, const MoveInput& in, const Turn& turn, uint32_t verdict) {
  if (!is_last_block(call.world.state)) {
    return;
  }
  if (verdict == kGo && in.geometry[Geometry::kOverflowed] != 0) {
    fill_outputs(in);
  }
  Output outputs[kRowKinds];
  for (int kind = 0; kind < kRowKinds; ++kind) {
    outputs[kind] = {in.rows[kind].out, in.num_rows * in.rows[kind].row_bytes, in.rows[kind].poison};
  }
  close_call(call, turn, verdict, outputs, kRowKinds, in.is_registered);
}

// -- rows through registers: every GPU

constexpr int kCopyThreads = 512;

__global__ void __launch_bounds__(kCopyThreads, 1)
    moe_ep_move(const __grid_constant__ Call call, const __grid_constant__ MoveInput in) {
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const uint32_t verdict = open_call(call, turn);
  if (verdict == kGo) {
    const int most = most_chunks(in.geometry, world.size);
    const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
    for (;;) {
      const MoveWork work = move_work(world, in, warp_ticket(world.state), most);
      if (work.kind == MoveWork::kEnd) {
        break;
      }
      if (work.kind == MoveWork::kPublish) {
        const Span span = part_of_tokens<kMoveParts>(in.num_tokens, work.chunk, work.part);
        for (int kind = 0; kind < kRowKinds && !in.is_registered; ++kind) {
          const Rows& rows = in.rows[kind];
          char* staging = const_cast<char*>(staging_place(world, in, turn, world.rank, kind).rows);
          for (int64_t token = span.first; token < span.first + span.count; ++token) {
            copy_row(rows.x + token * rows.stride_bytes, staging, rows.row_bytes,
                     lane_idx() == 0 ? static_cast<int>(token) : -1, -1);
          }
        }
        __threadfence_system();
        post_chunk(world, turn, work);
      } else if (work.kind == MoveWork::kPull && !overflowed) {
        const Span span = rows_of(world, in, work);
        if (span.count == 0 || !chunk_arrived(world, turn, work)) {
          continue;
        }
        for (int kind = 0; kind < kRowKinds; ++kind) {
          const Rows& rows = in.rows[kind];
          const Place source = source_place(world, in, turn, work.source, kind);
          for (int64_t row = span.first; row < span.first + span.count && rows.row_bytes > 0; ++row) {
            const Places places = places_of(in, row);
            copy_row(source.rows + in.recv_token[row] * source.stride_bytes, rows.out, rows.row_bytes, places.mine,
                     places.mine_too);
          }
        }
      } else if (work.kind == MoveWork::kPad || work.kind == MoveWork::kTail) {
        pad_rows(in, padding_of(world, in, work), lane_idx(), 32);
      }
    }
  }
  end_move(call, in, turn, verdict);
}

// -- rows through shared memory by the copy engine: sm_90 and later

// A warp is a worker with a ring of stages. Rows longer than a stage travel in pieces.
constexpr int kWorkers = 4;
constexpr int kMaxStages = 16;
constexpr int kMaxPieceBytes = 16384;
constexpr int kRingBytes = 220 * 1024;

struct Pieces {
  int count;      // of a row; the scales, where there are any, are one more
  int num_bytes;  // of a piece; the last one may be shorter
  int total;      // of what travels with a token
  int stage_bytes;
  int num_stages;  // of a ring
};

Pieces pieces_of(const MoveInput& in) {
  const int64_t row_bytes = in.rows[0].row_bytes, scale_bytes = in.rows[1].row_bytes;
  Pieces pieces;
  pieces.count = static_cast<int>((row_bytes + kMaxPieceBytes - 1) / kMaxPieceBytes);
  pieces.num_bytes = static_cast<int>((row_bytes / 16 + pieces.count - 1) / pieces.count * 16);
  pieces.total = pieces.count + (scale_bytes > 0 ? 1 : 0);
  MOE_EP_CHECK(scale_bytes <= kMaxPieceBytes, "a row of scales has ", scale_bytes, " bytes, the limit is ",
               kMaxPieceBytes, ".");
  pieces.stage_bytes = (std::max(pieces.num_bytes, static_cast<int>(scale_bytes)) + 127) / 128 * 128;
  pieces.num_stages = std::min(kMaxStages, kRingBytes / kWorkers / pieces.stage_bytes);
  return pieces;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

struct Ring {
  char* stages;
  uint64_t* barriers;
  int stage_bytes;
  int num_stages;
  uint32_t num_loads;  // so far

  __device__ int stage(uint32_t load) const { return load % num_stages; }
  __device__ uint32_t parity(uint32_t load) const { return load / num_stages % 2; }
};

// What lies where for a run of rows: one entry a kind of rows.
struct Route {
  Place from[kRowKinds];
  char* to[kRowKinds];
};

struct Part {
  int kind;
  int64_t offset;
  uint32_t num_bytes;
};

__device__ Part part_at(const MoveInput& in, const Pieces& pieces, int piece) {
  if (piece == pieces.count) {
    return {1, 0, static_cast<uint32_t>(in.rows[1].row_bytes)};
  }
  const int64_t offset = static_cast<int64_t>(piece) * pieces.num_bytes;
  return {0, offset, static_cast<uint32_t>(min64(pieces.num_bytes, in.rows[0].row_bytes - offset))};
}

// By a whole warp: moves `count` rows, at most 32. Lane i knows the source row of row i (`token`); all lanes learn the
// places of a row from `places(i)`. kPending stores may still read their stages while later ones are loaded.
template <int kPending, typename PlacesOf>
__device__ void move_rows(Ring& ring, const MoveInput& in, const Pieces& pieces, const Route& route, int token,
                          int count, PlacesOf places) {
  const int lane = lane_idx(), num_jobs = count * pieces.total, ahead = ring.num_stages - kPending;
  const uint32_t base = ring.num_loads;
  const auto load = [&](int job) {
    const int64_t at = __shfl_sync(kFullWarp, token, job / pieces.total);
    if (lane == 0) {
      const Part part = part_at(in, pieces, job % pieces.total);
      const Place& from = route.from[part.kind];
      const int stage = ring.stage(base + job);
      load_bulk(ring.stages + stage * ring.stage_bytes, from.rows + at * from.stride_bytes + part.offset,
                part.num_bytes, ring.barriers + stage);
    }
  };
  for (int job = 0; job < min(num_jobs, ahead); ++job) {
    load(job);
  }
  Places next = places(0);
  Places now = next;
  for (int job = 0; job < num_jobs; ++job) {
    const int piece = job % pieces.total;
    if (piece == 0) {
      now = next;
      if (job + pieces.total < num_jobs) {
        next = places(job / pieces.total + 1);
      }
    }
    const int stage = ring.stage(base + job);
    wait_barrier(ring.barriers + stage, ring.parity(base + job));
    const Part part = part_at(in, pieces, piece);
    const int64_t row_bytes = in.rows[part.kind].row_bytes;
    char* to = route.to[part.kind] + part.offset;
    // One lane stores: groups of stores belong to a thread, and every thread's would be waited for in turn.
    const char* from = ring.stages + stage * ring.stage_bytes;
    for (unsigned int left = __ballot_sync(kFullWarp, now.mine >= 0); left != 0; left &= left - 1) {
      const int64_t place = __shfl_sync(kFullWarp, now.mine, __ffs(left) - 1);
      if (lane == 0) {
        store_bulk(to + place * row_bytes, from, part.num_bytes);
      }
    }
    for (unsigned int left = __ballot_sync(kFullWarp, now.mine_too >= 0); left != 0; left &= left - 1) {
      const int64_t place = __shfl_sync(kFullWarp, now.mine_too, __ffs(left) - 1);
      if (lane == 0) {
        store_bulk(to + place * row_bytes, from, part.num_bytes);
      }
    }
    if (lane == 0) {
      commit_stores();
      wait_stores_read<kPending>();  // the stage of kPending jobs ago is free
    }
    __syncwarp();
    if (job + ahead < num_jobs) {
      load(job + ahead);
    }
  }
  if (lane == 0) {
    wait_stores_read<0>();
  }
  __syncwarp();
  ring.num_loads = base + num_jobs;
}

__global__ void __launch_bounds__(kWorkers * 32, 1)
    moe_ep_move_bulk(const __grid_constant__ Call call, const __grid_constant__ MoveInput in, const Pieces pieces) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[kWorkers][kMaxStages];
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const int lane = lane_idx();
  Ring ring = {shared + static_cast<int64_t>(warp_idx()) * pieces.num_stages * pieces.stage_bytes, barriers[warp_idx()],
               pieces.stage_bytes, pieces.num_stages, 0};
  if (lane < kMaxStages) {
    init_barrier(&ring.barriers[lane]);
  }
  fence_copy_engine();
  __syncwarp();
  const uint32_t verdict = open_call(call, turn);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
  const int most = verdict == kGo ? most_chunks(in.geometry, world.size) : 0;
  const auto move = [&](const Route& route, int token, int count, auto places) {
    if (ring.num_stages >= 6) {
      move_rows<3>(ring, in, pieces, route, token, count, places);
    } else {
      move_rows<1>(ring, in, pieces, route, token, count, places);
    }
  };
  while (verdict == kGo) {
    const MoveWork work = move_work(world, in, warp_ticket(world.state), most);
    if (work.kind == MoveWork::kEnd) {
      break;
    }
    Route route;
    if (work.kind == MoveWork::kPublish && !in.is_registered) {
      const Span span = part_of_tokens<kMoveParts>(in.num_tokens, work.chunk, work.part);
      for (int kind = 0; kind < kRowKinds; ++kind) {
        route.from[kind] = {in.rows[kind].x, in.rows[kind].stride_bytes};
        route.to[kind] = const_cast<char*>(staging_place(world, in, turn, world.rank, kind).rows);
      }
      for (int64_t first = span.first; first < span.first + span.count; first += 32) {
        const int count = static_cast<int>(min64(32, span.first + span.count - first));
        move(route, static_cast<int>(first) + lane, count,
             [&](int row) { return Places{lane == 0 ? static_cast<int>(first) + row : -1, -1}; });
      }
      wait_stores();
      fence_copy_engine();
      __threadfence_system();
      post_chunk(world, turn, work);
    } else if (work.kind == MoveWork::kPull && !overflowed) {
      const Span span = rows_of(world, in, work);
      if (span.count == 0 || !chunk_arrived(world, turn, work)) {
        continue;
      }
      fence_copy_engine();
      for (int kind = 0; kind < kRowKinds; ++kind) {
        route.from[kind] = source_place(world, in, turn, work.source, kind);
        route.to[kind] = in.rows[kind].out;
      }
      for (int64_t first = span.first; first < span.first + span.count; first += 32) {
        const int count = static_cast<int>(min64(32, span.first + span.count - first));
        const int token = lane < count ? in.recv_token[first + lane] : 0;
        move(route, token, count, [&](int row) { return places_of(in, first + row); });
      }
    } else if (work.kind == MoveWork::kPad || work.kind == MoveWork::kTail) {
      pad_rows(in, padding_of(world, in, work), lane, 32);
    }
  }
  wait_stores();
  fence_copy_engine();
  end_move(call, in, turn, verdict);
}

#else

__global__ void moe_ep_move_bulk(const __grid_constant__ Call, const __grid_constant__ MoveInput, const Pieces) {}

#endif

}  // namespace

bool has_bulk_copies() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, moe_ep_move_bulk), "dispatch: the kernel's attributes");
  return attributes.ptxVersion >= 90;
}

void launch_move(const Call& call, const MoveInput& input, bool use_tma, int num_sms, cudaStream_t stream) {
  if (!use_tma) {
    moe_ep_move<<<num_sms, kCopyThreads, 0, stream>>>(call, input);
    check_cuda(cudaGetLastError(), "dispatch: the launch");
    return;
  }
  const Pieces pieces = pieces_of(input);
  const int num_bytes = kWorkers * pieces.num_stages * pieces.stage_bytes;
  allow_shared_memory<moe_ep_move_bulk>(num_bytes, "dispatch: the shared memory of the rings");
  moe_ep_move_bulk<<<num_sms, kWorkers * 32, num_bytes, stream>>>(call, input, pieces);
  check_cuda(cudaGetLastError(), "dispatch: the launch");
}

}  // namespace moe_ep
