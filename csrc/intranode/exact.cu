#include "intranode/combine.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

__device__ void copy_bytes(char* out, const char* source, int64_t first, int64_t end) {
  for (int64_t at = first + lane_idx() * 4; at < end; at += 32 * 4) {
    *reinterpret_cast<uint32_t*>(out + at) = *reinterpret_cast<const uint32_t*>(source + at);
  }
}

template <typename Elem>
__global__ void __launch_bounds__(kThreads, 1)
    moe_ep_combine_exact(const __grid_constant__ Call call, const __grid_constant__ ExactInput exact) {
  using Wide = typename RowMath<Elem>::Wide;
  const CombineInput& in = exact.combine;
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const uint32_t verdict = open_call(call, turn, call.header[kStatusWord], in.geometry[Geometry::kOverflowed] != 0);
  const unsigned int lost = lost_ranks(world, turn);
  while (verdict == kGo) {
    const uint32_t ticket = warp_ticket(world.state);
    if (ticket >= 2 * kNumFlags) {
      break;
    }
    const int part = ticket % kNumFlags;
    if (ticket < kNumFlags) {  // publish
      char* slot = slot_of(world, world.rank, turn);
      const auto copy = [&](char* out, const void* source, int64_t count, int64_t width) {
        copy_bytes(out, static_cast<const char*>(source), count * part / kNumFlags * width,
                   count * (part + 1) / kNumFlags * width);
      };
      copy(slot, in.rows, exact.num_rows, in.row_bytes);
      copy(slot + call.header[kFirstOffsetWord], in.pair_row, exact.num_compact_rows * in.num_topk, 4);
      if (in.weights != nullptr) {
        copy(slot + call.header[kSecondOffsetWord], in.weights, exact.num_rows, sizeof(Wide));
      }
      __threadfence_system();
      __syncwarp();
      if (lane_idx() < world.size) {
        __threadfence_system();
        post_flag(world, turn, lane_idx(), part);
      }
      __syncwarp();
      continue;
    }
    bool arrived = true;
    for (int i = lane_idx(); i < world.size * kNumFlags && arrived; i += 32) {
      const int peer = i / kNumFlags;
      const uint64_t* flag = &world.control[world.rank]->flags[peer][turn.slot][i % kNumFlags];
      arrived = wait_word(world, turn, peer, kWaitFlag, flag, turn.tag);
    }
    __syncwarp();  // what one lane has seen, all see
    if (!__all_sync(kFullWarp, arrived)) {
      break;
    }
    for (int64_t token = in.num_tokens * part / kNumFlags; token < in.num_tokens * (part + 1) / kNumFlags; ++token) {
      for (int64_t begin = 0; begin < in.row_bytes; begin += Columns<Elem>::kBytes) {
        Sum<Elem> sum;
        for (int i = 0; i < 2; ++i) {
          if (in.bias[i] != nullptr) {
            Columns<Elem> bias;
            bias.load(in.bias[i] + token * in.row_bytes, begin, in.row_bytes);
            sum.add(bias);
          }
        }
        bool poisoned = false;
        for (int slot = 0; slot < in.num_topk; ++slot) {
          const int64_t rank = exact.slot_rank[token * in.num_topk + slot];
          poisoned |= rank >= 0 && (lost >> rank & 1) != 0;
          if (rank < 0 || poisoned) {
            continue;
          }
          const char* staging = slot_of(world, static_cast<int>(rank), turn);
          const int64_t* header = world.control[world.rank]->headers[rank][turn.slot].words;
          const int64_t compact = in.token_row[token * world.size + rank];
          const int32_t* pair_row = reinterpret_cast<const int32_t*>(staging + header[kFirstOffsetWord]);
          const int64_t row = pair_row[compact * in.num_topk + slot];
          poisoned |= row < 0;
          if (row < 0) {
            continue;
          }
          Columns<Elem> term;
          term.load(staging + row * in.row_bytes, begin, in.row_bytes);
          if (exact.is_weighted) {
            sum.add(term, reinterpret_cast<const Wide*>(staging + header[kSecondOffsetWord])[row]);
          } else {
            sum.add(term);
          }
        }
        Columns<Elem> y = sum.rounded();
        if (poisoned) {
          const uint32_t low = static_cast<uint32_t>(in.poison), high = static_cast<uint32_t>(in.poison >> 32);
          for (int i = 0; i < Columns<Elem>::kCount; ++i) {
            y.raw[i] = make_uint4(low, high, low, high);
          }
        }
        store_columns(y, in.y + token * in.row_bytes, begin, in.row_bytes);
      }
    }
  }
  const Output output = {in.y, in.num_tokens * in.row_bytes, in.poison};
  if (is_last_block(world.state)) {
    if (verdict == kGo && in.geometry[Geometry::kNoPlan] != 0) {
      fill_output(output);
    }
    close_call(call, turn, verdict, &output, 1, false);
  }
}

}  // namespace

void launch_combine_exact(const Call& call, const ExactInput& input, RowKind kind, int num_sms, cudaStream_t stream) {
  for_kind(kind,
           [&](auto elem) { moe_ep_combine_exact<decltype(elem)><<<num_sms, kThreads, 0, stream>>>(call, input); });
  check_cuda(cudaGetLastError(), "exact combine: the launch");
}

}  // namespace moe_ep
