// What the kernels that add rows up share: the order of their tickets, sums of columns, where partial sums lie.
#pragma once

#include "common/check.h"
#include "common/row_math.cuh"
#include "exchange/device.cuh"
#include "intranode/combine.h"

// Tickets of a call, in steps: step i reduces, for every peer, the rows of chunk i of its tokens, and adds up at home
// the own tokens of chunk i - lead. As in move.cuh, chunks ascend on all ranks and a chunk is reduced before
// the same one is waited for (8, 9). Of ranks whose rows are read where they lie nobody waits, and they reduce nothing.

namespace moe_ep {

struct CombineWork {
  enum Kind { kReduce, kHome, kNothing, kEnd } kind;
  int source;
  int chunk;
  int part;
};

__device__ inline CombineWork combine_work(const World& world, const CombineInput& in, uint32_t ticket, int most) {
  const int size = world.size, lead = min(in.lead, most);
  const uint32_t reduces = in.is_registered ? 0 : kParts * (size - 1), per_step = reduces + kParts;
  const uint32_t step = ticket / per_step, place = ticket % per_step;
  if (step >= static_cast<uint32_t>(most + lead)) {
    return {CombineWork::kEnd, 0, 0, 0};
  }
  if (place < reduces) {
    const int source = (world.rank + 1 + static_cast<int>(place) / kParts) % size;
    return {static_cast<int>(step) < most ? CombineWork::kReduce : CombineWork::kNothing, source,
            static_cast<int>(step), static_cast<int>(place) % kParts};
  }
  const int chunk = static_cast<int>(step) - lead;
  return {chunk < 0 ? CombineWork::kNothing : CombineWork::kHome, world.rank, chunk, static_cast<int>(place - reduces)};
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

  __device__ Sum() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Math::begin(total[i]);
    }
  }

  __device__ void add(const Columns<Elem>& term) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Math::add(total[i], term.raw[i]);
    }
    is_empty = false;
  }

  __device__ void add(const Columns<Elem>& term, Wide weight) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Math::add_product(total[i], term.raw[i], weight);
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
__device__ inline void store_columns(const Columns<Elem>& columns, char* row, int64_t begin, int64_t row_bytes) {
#pragma unroll
  for (int i = 0; i < Columns<Elem>::kCount; ++i) {
    const int64_t at = begin + i * 512 + lane_idx() * 16;
    if (at < row_bytes) {
      store_16(row + at, columns.raw[i]);
    }
  }
}

// By a whole warp: gives up rows of `out`.
__device__ inline void fill_rows(char* out, const Span& span, const CombineInput& in) {
  const uint32_t low = static_cast<uint32_t>(in.poison), high = static_cast<uint32_t>(in.poison >> 32);
  for (int64_t at = lane_idx() * 16; at < span.count * in.row_bytes; at += 512) {
    store_16(out + span.first * in.row_bytes + at, make_uint4(low, high, low, high));
  }
}

// By a whole block, before anything else: whether this kernel is a round that is no call. It has tokens on no rank, or
// is behind one that was refused, which whoever refused does not know of; its output is filled already. All ranks see
// this alike.
__device__ inline bool is_no_call(const World& world, const CombineInput& in) {
  return in.round_idx > 0 && (world.state->outcome != kGo || most_chunks(in.geometry, world.size) == 0);
}

// What the header says of this rank: its own status, or that the rows of a round do not fit.
__device__ inline int64_t status_of(const Call& call, const CombineInput& in) {
  const int64_t status = call.header[kStatusWord];
  const bool fits = in.round_idx < 0 || in.is_registered || in.geometry[RoundGeometry::kTooLarge] == 0;
  return fits || status != kFine ? status : kDoesNotFit;
}

// The own tokens that a part of a chunk adds up.
__device__ inline Span tokens_of_part(const World& world, const CombineInput& in, int chunk, int part) {
  if (in.round_idx < 0) {
    return part_of_tokens(in.num_tokens, chunk, part);
  }
  const Span span = part_of_tokens(in.geometry[Geometry::kTokens + world.rank], chunk, part);
  return {in.geometry[RoundGeometry::kFirstToken] + span.first, span.count};
}

// Where the sums for `source` begin in rank r's staging, less the compact rows before: the own rows are not there.
__device__ inline int64_t staging_shift(const CombineInput& in, int size, int rank, int source) {
  if (in.round_idx >= 0) {
    return in.geometry[RoundGeometry::shifts(size) + rank * size + source];
  }
  return source > rank ? in.geometry[Geometry::rank_rows(size) + rank * size + rank] : 0;
}

// By a whole warp: the ranks whose rows are lost, as bits.
__device__ inline unsigned int lost_ranks(const World& world, const Turn& turn) {
  const int lane = lane_idx();
  const bool lost =
      lane < world.size && world.control[world.rank]->headers[lane][turn.slot].words[kOverflowedWord] != 0;
  return __ballot_sync(kFullWarp, lost);
}

// What `rank`, a peer, has for compact row `row` of an own token.
__device__ inline const char* peer_row(const World& world, const CombineInput& in, const Turn& turn, int rank,
                                       int64_t row) {
  const int64_t* words = world.control[world.rank]->headers[rank][turn.slot].words + kRegisteredWord;
  if (words[0] != 0) {
    return world.blocks[words[0] - 1][rank] + words[1] + row * words[2];
  }
  return slot_of(world, rank, turn) + (row - staging_shift(in, world.size, rank, world.rank)) * in.row_bytes;
}

// By a whole warp: until every peer has reduced the rows of this chunk of the own tokens.
__device__ inline bool chunk_is_reduced(const World& world, const Turn& turn, int chunk) {
  bool arrived = true;
  for (int i = lane_idx(); i < world.size * kParts; i += 32) {
    const int peer = i / kParts;
    if (peer != world.rank && arrived && !is_registered(world, turn, peer)) {
      const uint64_t* flag = &world.control[world.rank]->flags[peer][turn.slot][chunk * kParts + i % kParts];
      arrived = wait_word(world, turn, peer, kWaitFlag, flag, turn.tag);
    }
  }
  __syncwarp();  // what one lane has seen, all see
  return __all_sync(kFullWarp, arrived);
}

}  // namespace moe_ep
