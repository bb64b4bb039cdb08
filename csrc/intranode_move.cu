#include <algorithm>

#include "bulk_copy.cuh"
#include "intranode_move.cuh"

namespace moe_ep {
namespace {

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
      const Work work = work_of(world, in, warp_ticket(world.state), most);
      if (work.kind == Work::kEnd) {
        break;
      }
      if (work.kind == Work::kPublish) {
        const Span span = part_of_tokens(in.num_tokens, work.chunk, work.part);
        char* staging = slot_of(world, world.rank, turn);
        for (int64_t token = span.first; token < span.first + span.count; ++token) {
          copy_row(in.x + token * in.x_stride_bytes, staging, in.row_bytes,
                   lane_idx() == 0 ? static_cast<int>(token) : -1, -1);
        }
        __threadfence_system();
        post_chunk(world, turn, work);
      } else if (work.kind == Work::kPull && !overflowed) {
        const Span span = rows_of(world, in, work);
        if (span.count == 0 || !chunk_arrived(world, turn, work)) {
          continue;
        }
        int64_t stride;
        const char* source = source_rows(world, in, turn, work.source, &stride);
        for (int64_t row = span.first; row < span.first + span.count; ++row) {
          const Places places = places_of(in, row);
          copy_row(source + in.recv_token[row] * stride, in.out, in.row_bytes, places.mine, places.mine_too);
        }
      } else if (work.kind == Work::kPad || work.kind == Work::kTail) {
        pad_rows(in, padding_of(world, in, work), lane_idx(), 32);
      }
    }
  }
  const bool poisoned = verdict != kGo || in.geometry[Geometry::kOverflowed] != 0;
  const Output output = {in.out, in.num_rows * in.row_bytes, in.poison};
  if (is_last_block(world.state)) {
    if (verdict == kGo && poisoned) {
      fill_output(output);
    }
    close_call(call, turn, verdict, &output, 1, false);
  }
}

// -- rows through shared memory by the copy engine: sm_90 and later
// -----------------------------------------------------

// A warp is a worker with a ring of stages. Rows longer than a stage travel in pieces.
constexpr int kWorkers = 4;
constexpr int kMaxStages = 16;
constexpr int kMaxPieceBytes = 16384;
constexpr int kRingBytes = 220 * 1024;

struct Pieces {
  int count;       // of a row
  int num_bytes;   // of a piece; the last one may be shorter
  int num_stages;  // of a ring
};

Pieces pieces_of(int64_t row_bytes) {
  Pieces pieces;
  pieces.count = static_cast<int>((row_bytes + kMaxPieceBytes - 1) / kMaxPieceBytes);
  pieces.num_bytes = static_cast<int>((row_bytes / 16 + pieces.count - 1) / pieces.count * 16);
  pieces.num_stages = std::min(kMaxStages, kRingBytes / kWorkers / ((pieces.num_bytes + 127) / 128 * 128));
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

// By a whole warp: moves `count` rows. Lane i knows the source row of row i (`token`), all lanes learn the places of a
// row from `places(i)`. At most 32 rows.
template <typename PlacesOf>
__device__ void move_rows(Ring& ring, const Pieces& pieces, int64_t row_bytes, const char* source, int64_t stride,
                          char* out, int token, int count, PlacesOf places) {
  const int lane = lane_idx(), num_jobs = count * pieces.count, ahead = ring.num_stages - 1;
  const uint32_t base = ring.num_loads;
  const auto load = [&](int job) {
    const int row = job / pieces.count, piece = job % pieces.count;
    const int64_t at = __shfl_sync(kFullWarp, token, row);
    if (lane == 0) {
      const int64_t offset = static_cast<int64_t>(piece) * pieces.num_bytes;
      const int stage = ring.stage(base + job);
      load_bulk(ring.stages + stage * ring.stage_bytes, source + at * stride + offset,
                static_cast<uint32_t>(min64(pieces.num_bytes, row_bytes - offset)), ring.barriers + stage);
    }
  };
  for (int job = 0; job < min(num_jobs, ahead); ++job) {
    load(job);
  }
  Places next = places(0);
  for (int job = 0; job < num_jobs; ++job) {
    const int piece = job % pieces.count;
    const Places now = next;
    if (piece == pieces.count - 1 && job + 1 < num_jobs) {
      next = places((job + 1) / pieces.count);
    }
    const int stage = ring.stage(base + job);
    wait_barrier(ring.barriers + stage, ring.parity(base + job));
    const int64_t offset = static_cast<int64_t>(piece) * pieces.num_bytes;
    const uint32_t num_bytes = static_cast<uint32_t>(min64(pieces.num_bytes, row_bytes - offset));
    if (now.mine >= 0) {
      store_bulk(out + now.mine * row_bytes + offset, ring.stages + stage * ring.stage_bytes, num_bytes);
    }
    if (now.mine_too >= 0) {
      store_bulk(out + now.mine_too * row_bytes + offset, ring.stages + stage * ring.stage_bytes, num_bytes);
    }
    commit_stores();
    wait_stores_read<1>();  // the stage of the job before is free in every lane
    __syncwarp();
    if (job + ahead < num_jobs) {
      load(job + ahead);
    }
  }
  wait_stores_read<0>();
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
  Ring ring;
  ring.stage_bytes = (pieces.num_bytes + 127) / 128 * 128;
  ring.num_stages = pieces.num_stages;
  ring.stages = shared + static_cast<int64_t>(warp_idx()) * ring.num_stages * ring.stage_bytes;
  ring.barriers = barriers[warp_idx()];
  ring.num_loads = 0;
  if (lane < kMaxStages) {
    init_barrier(&ring.barriers[lane]);
  }
  fence_copy_engine();
  __syncwarp();
  const uint32_t verdict = open_call(call, turn);
  if (verdict == kGo) {
    const int most = most_chunks(in.geometry, world.size);
    const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
    for (;;) {
      const Work work = work_of(world, in, warp_ticket(world.state), most);
      if (work.kind == Work::kEnd) {
        break;
      }
      if (work.kind == Work::kPublish) {
        const Span span = part_of_tokens(in.num_tokens, work.chunk, work.part);
        char* staging = slot_of(world, world.rank, turn);
        for (int64_t first = span.first; first < span.first + span.count; first += 32) {
          const int count = static_cast<int>(min64(32, span.first + span.count - first));
          move_rows(ring, pieces, in.row_bytes, in.x, in.x_stride_bytes, staging, static_cast<int>(first) + lane, count,
                    [&](int row) { return Places{lane == 0 ? static_cast<int>(first) + row : -1, -1}; });
        }
        wait_stores();
        fence_copy_engine();
        __threadfence_system();
        post_chunk(world, turn, work);
      } else if (work.kind == Work::kPull && !overflowed) {
        const Span span = rows_of(world, in, work);
        if (span.count == 0 || !chunk_arrived(world, turn, work)) {
          continue;
        }
        fence_copy_engine();
        int64_t stride;
        const char* source = source_rows(world, in, turn, work.source, &stride);
        for (int64_t first = span.first; first < span.first + span.count; first += 32) {
          const int count = static_cast<int>(min64(32, span.first + span.count - first));
          const int token = lane < count ? in.recv_token[first + lane] : 0;
          move_rows(ring, pieces, in.row_bytes, source, stride, in.out, token, count,
                    [&](int row) { return places_of(in, first + row); });
        }
      } else if (work.kind == Work::kPad || work.kind == Work::kTail) {
        pad_rows(in, padding_of(world, in, work), lane, 32);
      }
    }
    wait_stores();
    fence_copy_engine();
  }
  const Output output = {in.out, in.num_rows * in.row_bytes, in.poison};
  if (is_last_block(world.state)) {
    if (verdict == kGo && in.geometry[Geometry::kOverflowed] != 0) {
      fill_output(output);
    }
    close_call(call, turn, verdict, &output, 1, false);
  }
}

#else

__global__ void moe_ep_move_bulk(const __grid_constant__ Call, const __grid_constant__ MoveInput, const Pieces) {}

#endif

}  // namespace

void launch_move(const Call& call, const MoveInput& input, bool use_tma, int num_sms, cudaStream_t stream) {
  if (!use_tma) {
    moe_ep_move<<<num_sms, kCopyThreads, 0, stream>>>(call, input);
    check_cuda(cudaGetLastError(), "dispatch: the launch");
    return;
  }
  const Pieces pieces = pieces_of(input.row_bytes);
  const int num_bytes = kWorkers * pieces.num_stages * ((pieces.num_bytes + 127) / 128 * 128);
  check_cuda(cudaFuncSetAttribute(moe_ep_move_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, num_bytes),
             "dispatch: the shared memory of the rings");
  moe_ep_move_bulk<<<num_sms, kWorkers * 32, num_bytes, stream>>>(call, input, pieces);
  check_cuda(cudaGetLastError(), "dispatch: the launch");
}

}  // namespace moe_ep
