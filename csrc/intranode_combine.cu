#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.h"
#include "exchange_device.cuh"
#include "intranode_combine.h"
#include "row_math.cuh"

// Tickets of a call, in steps: step i reduces, for every peer, the rows of chunk i of its tokens, and adds up at home
// the own tokens of chunk i - kLead. As in intranode_move.cuh, all ranks number them alike (8, 9).

namespace moe_ep {
namespace {

constexpr int kLead = 6;
constexpr int kThreads = 512;

struct Work {
  enum Kind { kReduce, kHome, kNothing, kEnd } kind;
  int source;
  int chunk;
  int part;
};

__device__ Work work_of(const World& world, uint32_t ticket, int most) {
  const int size = world.size, lead = size == 1 ? 0 : kLead;
  const uint32_t reduces = kParts * (size - 1), per_step = reduces + kParts;
  const uint32_t step = ticket / per_step, place = ticket % per_step;
  if (step >= static_cast<uint32_t>(most + lead)) {
    return {Work::kEnd, 0, 0, 0};
  }
  if (place < reduces) {
    const int source = (world.rank + 1 + static_cast<int>(place) / kParts) % size;
    return {static_cast<int>(step) < most ? Work::kReduce : Work::kNothing, source, static_cast<int>(step),
            static_cast<int>(place) % kParts};
  }
  const int chunk = static_cast<int>(step) - lead;
  return {chunk < 0 ? Work::kNothing : Work::kHome, world.rank, chunk, static_cast<int>(place - reduces)};
}

// A warp adds columns of 512 bytes, kColumns at a time, so that a lane holds kColumns times 16 bytes of every term.
template <typename Elem>
constexpr int kColumns = sizeof(Elem) == 4 ? 4 : 2;

template <typename Elem>
struct Columns {
  using Math = RowMath<Elem>;
  using Wide = typename Math::Wide;
  static constexpr int kCount = kColumns<Elem>;
  static constexpr int64_t kBytes = kCount * 512;

  uint4 raw[kCount];

  __device__ void load(const char* row, int64_t begin, int64_t row_bytes) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t at = begin + i * 512 + lane_idx() * 16;
      if (at < row_bytes) {
        raw[i] = load_16(row + at);
      }
    }
  }
};

template <typename Elem>
struct Sum {
  using Math = RowMath<Elem>;
  using Wide = typename Math::Wide;
  static constexpr int kCount = kColumns<Elem>;

  Wide total[kCount][Math::kElems];
  bool is_empty = true;

  __device__ void add(const Columns<Elem>& term) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Math::add(total[i], term.raw[i], is_empty);
    }
    is_empty = false;
  }

  __device__ void add(const Columns<Elem>& term, Wide weight) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Math::add_product(total[i], term.raw[i], weight, is_empty);
    }
    is_empty = false;
  }

  // The sum in the dtype of the rows; zeros where nothing was added.
  __device__ Columns<Elem> rounded() const {
    Columns<Elem> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out.raw[i] = is_empty ? make_uint4(0, 0, 0, 0) : Math::rounded(total[i]);
    }
    return out;
  }
};

template <typename Elem>
__device__ void store_columns(const Columns<Elem>& columns, char* row, int64_t begin, int64_t row_bytes) {
#pragma unroll
  for (int i = 0; i < Columns<Elem>::kCount; ++i) {
    const int64_t at = begin + i * 512 + lane_idx() * 16;
    if (at < row_bytes) {
      store_16(row + at, columns.raw[i]);
    }
  }
}

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

// Where the sums for `source` begin in rank r's staging, less the compact rows before: the own rows are not there.
__device__ int64_t staging_shift(const CombineInput& in, int size, int rank, int source) {
  return source > rank ? in.geometry[Geometry::rank_rows(size) + rank * size + rank] : 0;
}

template <typename Elem>
__device__ void reduce(const World& world, const CombineInput& in, const Turn& turn, const Work& work) {
  using Wide = typename RowMath<Elem>::Wide;
  const int32_t* chunk_rows =
      in.geometry + Geometry::chunk_rows(world.size) + work.source * (kMaxChunks + 1) + work.chunk;
  const Span span = part_of(chunk_rows[0], chunk_rows[1], work.part);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
  char* staging =
      slot_of(world, world.rank, turn) - staging_shift(in, world.size, world.rank, work.source) * in.row_bytes;
  for (int64_t row = span.first; row < span.first + span.count; ++row) {
    Terms<Wide> terms;
    if (in.expert_major && !overflowed) {
      terms = terms_of<Wide>(in, row);
    }
    for (int64_t begin = 0; begin < in.row_bytes; begin += Columns<Elem>::kBytes) {
      Columns<Elem> sum;
      if (overflowed) {
        const uint32_t low = static_cast<uint32_t>(in.poison), high = static_cast<uint32_t>(in.poison >> 32);
#pragma unroll
        for (int i = 0; i < Columns<Elem>::kCount; ++i) {
          sum.raw[i] = make_uint4(low, high, low, high);
        }
      } else if (in.expert_major) {
        sum = partial_of<Elem>(in, terms, begin);
      } else {
        sum.load(in.rows + row * in.row_bytes, begin, in.row_bytes);
      }
      store_columns(sum, staging + row * in.row_bytes, begin, in.row_bytes);
    }
  }
  __threadfence_system();
  __syncwarp();
  if (lane_idx() == 0) {
    post_flag(world, turn, work.source, work.chunk * kParts + work.part);
  }
  __syncwarp();
}

// By a whole warp: until every peer has reduced the rows of this chunk of the own tokens.
__device__ bool chunk_is_reduced(const World& world, const Turn& turn, int chunk) {
  bool arrived = true;
  for (int i = lane_idx(); i < world.size * kParts; i += 32) {
    const int peer = i / kParts;
    if (peer != world.rank && arrived) {
      const uint64_t* flag = &world.control[world.rank]->flags[peer][turn.slot][chunk * kParts + i % kParts];
      arrived = wait_word(world, turn, peer, kWaitFlag, flag, turn.tag);
    }
  }
  return __all_sync(kFullWarp, arrived);
}

template <typename Elem>
__device__ void add_at_home(const World& world, const CombineInput& in, const Turn& turn, int64_t token) {
  using Wide = typename RowMath<Elem>::Wide;
  const int size = world.size, lane = lane_idx();
  // Lane r: where rank r keeps its sum for this token.
  const int row = lane < size ? in.token_row[token * size + lane] : -1;
  const char* address = nullptr;
  if (row >= 0 && lane != world.rank) {
    address = slot_of(world, lane, turn) + (row - staging_shift(in, size, lane, world.rank)) * in.row_bytes;
  } else if (row >= 0 && !in.expert_major) {
    address = in.rows + static_cast<int64_t>(row) * in.row_bytes;
  }
  const unsigned int ranks = __ballot_sync(kFullWarp, row >= 0);
  const unsigned int stored = __ballot_sync(kFullWarp, address != nullptr);
  Terms<Wide> terms;
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
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
    Columns<Elem> y = sum.rounded();
    if (overflowed && (ranks >> world.rank & 1) != 0) {
      const uint32_t low = static_cast<uint32_t>(in.poison), high = static_cast<uint32_t>(in.poison >> 32);
#pragma unroll
      for (int i = 0; i < Columns<Elem>::kCount; ++i) {
        y.raw[i] = make_uint4(low, high, low, high);
      }
    }
    store_columns(y, in.y + token * in.row_bytes, begin, in.row_bytes);
  }
}

template <typename Elem>
__global__ void __launch_bounds__(kThreads, 1)
    moe_ep_combine(const __grid_constant__ Call call, const __grid_constant__ CombineInput in) {
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const uint32_t verdict = open_call(call, turn);
  if (verdict == kGo) {
    const int most = most_chunks(in.geometry, world.size);
    for (;;) {
      const Work work = work_of(world, warp_ticket(world.state), most);
      if (work.kind == Work::kEnd) {
        break;
      }
      if (work.kind == Work::kReduce) {
        reduce<Elem>(world, in, turn, work);
      } else if (work.kind == Work::kHome) {
        const Span span = part_of_tokens(in.num_tokens, work.chunk, work.part);
        if (span.count == 0 || !chunk_is_reduced(world, turn, work.chunk)) {
          continue;
        }
        for (int64_t token = span.first; token < span.first + span.count; ++token) {
          add_at_home<Elem>(world, in, turn, token);
        }
      }
    }
  }
  const Output output = {in.y, in.num_tokens * in.row_bytes, in.poison};
  end_call(call, turn, verdict, &output, 1);
}

// -- exact ------------------------------------------------------------------------------------------------------------

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
  const uint32_t verdict = open_call(call, turn);
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
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
          if (rank < 0) {
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
    if (verdict == kGo && overflowed) {
      fill_output(output);
    }
    close_call(call, turn, verdict, &output, 1, false);
  }
}

template <typename Launch>
void for_kind(RowKind kind, Launch launch) {
  switch (kind) {
    case RowKind::kBFloat16:
      return launch(__nv_bfloat16());
    case RowKind::kFloat16:
      return launch(__half());
    case RowKind::kFloat32:
      return launch(float());
    case RowKind::kFloat64:
      return launch(double());
  }
}

}  // namespace

void launch_combine(const Call& call, const CombineInput& input, RowKind kind, int num_sms, cudaStream_t stream) {
  for_kind(kind, [&](auto elem) { moe_ep_combine<decltype(elem)><<<num_sms, kThreads, 0, stream>>>(call, input); });
  check_cuda(cudaGetLastError(), "combine: the launch");
}

void launch_combine_exact(const Call& call, const ExactInput& input, RowKind kind, int num_sms, cudaStream_t stream) {
  for_kind(kind,
           [&](auto elem) { moe_ep_combine_exact<decltype(elem)><<<num_sms, kThreads, 0, stream>>>(call, input); });
  check_cuda(cudaGetLastError(), "exact combine: the launch");
}

}  // namespace moe_ep
