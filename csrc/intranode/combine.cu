#include "intranode/combine.cuh"

// Rows through registers, on every GPU: a warp adds up a row.

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

// The rows of one compact row on this rank, as the lanes of a warp know them: lane k holds slot k, and slot k + 32.
template <typename Wide>
struct Terms {
  int rows[2];
  Wide weights[2];
  unsigned int masks[2];
};

template <typename Wide>
__device__ Terms<Wide> terms_of(const CombineInput& in, int64_t compact) {
  Terms<Wide> terms;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = lane_idx() + half * 32;
    terms.rows[half] = slot < in.num_topk ? in.pair_row[compact * in.num_topk + slot] : -1;
    terms.weights[half] = 0;
    if (terms.rows[half] >= 0 && in.weights != nullptr) {
      terms.weights[half] = static_cast<const Wide*>(in.weights)[terms.rows[half]];
    }
    terms.masks[half] = __ballot_sync(kFullWarp, terms.rows[half] >= 0);
  }
  return terms;
}

// By a whole warp: this rank's sum for one compact row, in slot order, rounded. The next term is on its way while one
// is added.
template <typename Elem>
__device__ Columns<Elem> partial_of(const CombineInput& in, const Terms<typename RowMath<Elem>::Wide>& terms,
                                    int64_t begin) {
  using Wide = typename RowMath<Elem>::Wide;
  Sum<Elem> sum;
  unsigned int left[2] = {terms.masks[0], terms.masks[1]};
  Columns<Elem> next;
  Wide next_weight = 0;
  const auto fetch = [&] {
    const int half = left[0] != 0 ? 0 : 1;
    if (left[half] == 0) {
      return false;
    }
    const int lane = __ffs(left[half]) - 1;
    left[half] &= left[half] - 1;
    const int64_t row = __shfl_sync(kFullWarp, half == 0 ? terms.rows[0] : terms.rows[1], lane);
    next_weight = __shfl_sync(kFullWarp, half == 0 ? terms.weights[0] : terms.weights[1], lane);
    next.load(in.rows + row * in.row_bytes, begin, in.row_bytes);
    return true;
  };
  bool more = fetch();
  while (more) {
    const Columns<Elem> term = next;
    const Wide weight = next_weight;
    more = fetch();
    if (in.weights != nullptr) {
      sum.add(term, weight);
    } else {
      sum.add(term);
    }
  }
  return sum.rounded();
}

template <typename Elem>
__device__ void reduce(const World& world, const CombineInput& in, const Turn& turn, const CombineWork& work) {
  using Wide = typename RowMath<Elem>::Wide;
  const int32_t* chunk_rows =
      in.geometry + Geometry::chunk_rows(world.size) + work.source * (kMaxChunks + 1) + work.chunk;
  const Span span = part_of(chunk_rows[0], chunk_rows[1], work.part);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;  // a slot need not hold what came
  char* staging =
      slot_of(world, world.rank, turn) - staging_shift(in, world.size, world.rank, work.source) * in.row_bytes;
  for (int64_t row = span.first; row < span.first + span.count && !overflowed; ++row) {
    Terms<Wide> terms;
    if (in.expert_major) {
      terms = terms_of<Wide>(in, row);
    }
    for (int64_t begin = 0; begin < in.row_bytes; begin += Columns<Elem>::kBytes) {
      Columns<Elem> sum;
      if (in.expert_major) {
        sum = partial_of<Elem>(in, terms, begin);
      } else {
        sum.load(in.rows + row * in.row_bytes, begin, in.row_bytes);
      }
      store_columns(sum, staging + row * in.row_bytes, begin, in.row_bytes);
    }
  }
  __syncwarp();
  if (lane_idx() == 0) {
    post_flag(world, turn, work.source, work.chunk * kParts + work.part);
  }
  __syncwarp();
}

template <typename Elem>
__device__ void add_at_home(const World& world, const CombineInput& in, const Turn& turn, unsigned int lost,
                            int64_t token) {
  using Wide = typename RowMath<Elem>::Wide;
  const int size = world.size, lane = lane_idx();
  // Lane r: where rank r keeps its sum for this token.
  const int row = lane < size ? in.token_row[token * size + lane] : -1;
  if (__any_sync(kFullWarp, row >= 0 && (lost >> lane & 1) != 0)) {
    fill_rows(in.y, {token, 1}, in);
    return;
  }
  const char* address = nullptr;
  if (row >= 0 && lane != world.rank) {
    address = peer_row(world, in, turn, lane, row);
  } else if (row >= 0 && !in.expert_major) {
    address = in.rows + static_cast<int64_t>(row) * in.row_bytes;
  }
  const unsigned int ranks = __ballot_sync(kFullWarp, row >= 0);
  const unsigned int stored = __ballot_sync(kFullWarp, address != nullptr);
  Terms<Wide> terms;
  if (in.expert_major && (ranks >> world.rank & 1) != 0) {
    terms = terms_of<Wide>(in, __shfl_sync(kFullWarp, row, world.rank));
  }
  for (int64_t begin = 0; begin < in.row_bytes; begin += Columns<Elem>::kBytes) {
    Sum<Elem> sum;
    unsigned int to_load = stored;
    Columns<Elem> next;
    const auto fetch = [&] {
      if (to_load != 0) {
        const int rank = __ffs(to_load) - 1;
        to_load &= to_load - 1;
        const uint64_t source = __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(address), rank);
        next.load(reinterpret_cast<const char*>(source), begin, in.row_bytes);
      }
    };
    fetch();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (in.bias[i] != nullptr) {
        Columns<Elem> bias;
        bias.load(in.bias[i] + token * in.row_bytes, begin, in.row_bytes);
        sum.add(bias);
      }
    }
    for (unsigned int left = ranks; left != 0; left &= left - 1) {
      const int rank = __ffs(left) - 1;
      if ((stored >> rank & 1) != 0) {
        const Columns<Elem> term = next;
        fetch();
        sum.add(term);
      } else {
        sum.add(partial_of<Elem>(in, terms, begin));
      }
    }
    const Columns<Elem> y = sum.rounded();
    store_columns(y, in.y + token * in.row_bytes, begin, in.row_bytes);
  }
}

template <typename Elem>
__global__ void __launch_bounds__(kThreads, 1)
    moe_ep_combine(const __grid_constant__ Call call, const __grid_constant__ CombineInput in) {
  const World& world = call.world;
  if (is_no_call(world, in)) {
    return;
  }
  const Turn turn = turn_of(world);
  const uint32_t verdict = open_call(call, turn, status_of(call, in), in.geometry[Geometry::kOverflowed] != 0);
  if (verdict == kGo) {
    const unsigned int lost = lost_ranks(world, turn);
    const int most = most_chunks(in.geometry, world.size);
    for (;;) {
      const CombineWork work = combine_work(world, in, warp_ticket(world.state), most);
      if (work.kind == CombineWork::kEnd) {
        break;
      }
      if (work.kind == CombineWork::kReduce) {
        reduce<Elem>(world, in, turn, work);
      } else if (work.kind == CombineWork::kHome) {
        const Span span = tokens_of_part(world, in, work.chunk, work.part);
        if (span.count == 0 || !chunk_is_reduced(world, turn, work.chunk)) {
          continue;
        }
        for (int64_t token = span.first; token < span.first + span.count; ++token) {
          add_at_home<Elem>(world, in, turn, lost, token);
        }
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

}  // namespace

void launch_combine(const Call& call, const CombineInput& input, RowKind kind, int num_sms, cudaStream_t stream) {
  for_kind(kind, [&](auto elem) {
    moe_ep_combine<decltype(elem)>
        <<<num_sms, kThreads, 0, stream>>>(call, with_lead(input, call.world, num_sms * kThreads / 32));
  });
  check_cuda(cudaGetLastError(), "combine: the launch");
}

}  // namespace moe_ep
