#include "intranode/move.cuh"

// Rows through registers: runs on every GPU, and is what the path of sm_90 is tested against.

namespace moe_ep {
namespace {

constexpr int kCopyThreads = 512;

__global__ void __launch_bounds__(kCopyThreads, 1)
    moe_ep_move(const __grid_constant__ Call call, const __grid_constant__ MoveInput in) {
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const uint32_t verdict = open_call(call, turn);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
  const int most = verdict == kGo ? most_chunks(in.geometry, world.size) : 0;
  while (verdict == kGo) {
    const MoveWork work = move_work(world, in, warp_ticket(world.state), most);
    if (work.kind == MoveWork::kEnd) {
      break;
    }
    if (work.kind == MoveWork::kOwn) {
      const Span span = part_of_tokens(in.num_tokens, work.chunk, work.part);
      for (int kind = 0; kind < kRowKinds; ++kind) {
        const Rows& rows = in.rows[kind];
        char* staging = const_cast<char*>(staging_place(world, in, turn, world.rank, kind).rows);
        for (int64_t token = span.first; token < span.first + span.count && rows.row_bytes > 0; ++token) {
          const OwnToken own = own_token(world, in, token);
          copy_row(rows.x + token * rows.stride_bytes, rows.out, rows.row_bytes,
                   places_of(in, overflowed ? -1 : own.compact_row),
                   own.is_wanted && !in.is_registered ? staging + token * rows.row_bytes : nullptr);
        }
      }
      if (!in.is_registered) {
        post_chunk(world, turn, work);
      }
    } else if (work.kind == MoveWork::kPull && !overflowed) {
      const Span span = rows_of(world, in, work);
      if (span.count == 0 || !chunk_arrived(world, turn, work)) {
        continue;
      }
      for (int kind = 0; kind < kRowKinds; ++kind) {
        const Rows& rows = in.rows[kind];
        const Place source = source_place(world, in, turn, work.source, kind);
        for (int64_t row = span.first; row < span.first + span.count && rows.row_bytes > 0; ++row) {
          copy_row(source.rows + in.recv_token[row] * source.stride_bytes, rows.out, rows.row_bytes,
                   places_of(in, row));
        }
      }
    } else if (work.kind == MoveWork::kPad || work.kind == MoveWork::kTail) {
      pad_rows(in, padding_of(world, in, work), lane_idx(), 32);
    }
  }
  end_move(call, in, turn, verdict);
}

}  // namespace

void launch_move(const Call& call, const MoveInput& input, int num_sms, cudaStream_t stream) {
  moe_ep_move<<<num_sms, kCopyThreads, 0, stream>>>(call, with_lead(input, call.world, num_sms * kCopyThreads / 32));
  check_cuda(cudaGetLastError(), "dispatch: the launch");
}

}  // namespace moe_ep
