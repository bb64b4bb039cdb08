// The numbers of a round of a combine, each from the handle's. Every rank comes to the same ranges: they follow from
// numbers that all ranks have alike.
#pragma once

#include "intranode/rounds.h"

namespace moe_ep {

// Tokens [first, first + count) of a source.
struct TokenRange {
  int64_t first;
  int64_t count;
};

__host__ __device__ inline int64_t rows_between(const RoundsInput& in, int source, int rank) {
  return in.geometry[Geometry::rank_rows(in.size) + source * in.size + rank];
}

// Whether one round is enough: no rank has more rows for its peers than a slot holds.
__host__ __device__ inline bool is_one_round(const RoundsInput& in) {
  for (int rank = 0; rank < in.size; ++rank) {
    int64_t for_peers = 0;
    for (int source = 0; source < in.size; ++source) {
      for_peers += source == rank ? 0 : rows_between(in, source, rank);
    }
    if (for_peers > in.slot_rows) {
      return false;
    }
  }
  return true;
}

__host__ __device__ inline TokenRange range_of(const RoundsInput& in, bool one_round, int round, int source) {
  const int64_t num_tokens = in.geometry[Geometry::kTokens + source];
  if (one_round) {
    return {round == 0 ? 0 : num_tokens, round == 0 ? num_tokens : 0};
  }
  const int64_t first = num_tokens * round / in.num_rounds;
  return {first, num_tokens * (round + 1) / in.num_rounds - first};
}

// Where the rows for `source` begin in the staging of `rank`: there is room for a row of every token, since nobody
// knows how many rows of a range another rank has for a third one.
__host__ __device__ inline int64_t staging_begin(const RoundsInput& in, int round, int rank, int source) {
  int64_t begin = 0;
  for (int before = 0; before < source; ++before) {
    begin += before == rank ? 0 : range_of(in, false, round, before).count;
  }
  return begin;
}

// The first compact row of `source` whose token is `token` or behind it.
__host__ __device__ inline int32_t first_row_from(const RoundsInput& in, int source, int64_t token) {
  const int32_t* rows = in.geometry + Geometry::chunk_rows(in.size) + source * (kMaxChunks + 1);
  int32_t low = rows[0], high = rows[kMaxChunks];
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (in.recv_token[middle] < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The compact row at which chunk `chunk` of a source's range begins, for chunks [0, kMaxChunks].
__host__ __device__ inline int32_t chunk_row_of(const RoundsInput& in, bool one_round, int round, int source,
                                                int chunk) {
  const TokenRange range = range_of(in, one_round, round, source);
  if (in.geometry[Geometry::kOverflowed] != 0 || range.count == 0) {
    return 0;  // these rows are lost, and recv_token need not name them all
  }
  if (one_round) {
    return in.geometry[Geometry::chunk_rows(in.size) + source * (kMaxChunks + 1) + chunk];
  }
  return first_row_from(in, source, range.first + min64(chunk * chunk_tokens(range.count), range.count));
}

// How much less than its compact row the place of a row for `source` is, in the staging of `rank`. `first_row` is the
// first compact row of the round that `rank` has for `source`, if there is one.
__host__ __device__ inline int32_t shift_of(const RoundsInput& in, bool one_round, int round, int rank, int source,
                                            int64_t first_row) {
  if (one_round) {
    return static_cast<int32_t>(source > rank ? rows_between(in, rank, rank) : 0);
  }
  return static_cast<int32_t>(first_row - staging_begin(in, round, rank, source));
}

// Whether this rank's rows of a round may not fit. Those of a rank that received more than max_rows are lost instead.
__host__ __device__ inline bool is_too_large(const RoundsInput& in, bool one_round, int round) {
  return !one_round && in.geometry[Geometry::kOverflowed] == 0 &&
         staging_begin(in, round, in.rank, in.size) > in.slot_rows;
}

}  // namespace moe_ep
