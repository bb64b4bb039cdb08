// Plays combines in rounds with the numbers of csrc/intranode/rounds.cuh: ranks stage what the geometries say, and look
// for it where theirs say. Prints what is wrong.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "intranode/rounds.cuh"

using namespace moe_ep;

namespace {

struct Rank {
  std::vector<int32_t> geometry, recv_token, token_row, rounds;
};

struct Case {
  int size, num_rounds;
  int64_t slot_rows;
  std::vector<int64_t> num_tokens;
  double density;
  int overflowed = -1;
};

// [source][token][rank]: whether the token goes there.
std::vector<Rank> ranks_of(const Case& c, std::mt19937& random) {
  const int W = c.size;
  std::vector<Rank> ranks(W);
  for (Rank& rank : ranks) {
    rank.geometry.assign(Geometry::length(W, 1), 0);
  }
  std::bernoulli_distribution goes(c.density);
  for (int source = 0; source < W; ++source) {
    const int64_t T = c.num_tokens[source], size = chunk_tokens(T);
    ranks[source].token_row.assign(T * W, -1);
    for (int to = 0; to < W; ++to) {
      Rank& rank = ranks[to];
      int32_t* chunk_rows = rank.geometry.data() + Geometry::chunk_rows(W) + source * (kMaxChunks + 1);
      for (int64_t token = 0; token < T; ++token) {
        if (token % size == 0) {
          chunk_rows[token / size] = static_cast<int32_t>(rank.recv_token.size());
        }
        if (goes(random)) {
          ranks[source].token_row[token * W + to] = static_cast<int32_t>(rank.recv_token.size());
          rank.recv_token.push_back(static_cast<int32_t>(token));
        }
      }
      for (int chunk = num_chunks(T); chunk <= kMaxChunks; ++chunk) {
        chunk_rows[chunk] = static_cast<int32_t>(rank.recv_token.size());
      }
    }
  }
  for (int source = 0; source < W; ++source) {
    for (int to = 0; to < W; ++to) {
      const std::vector<int32_t>& rows = ranks[source].token_row;
      int32_t count = 0;
      for (size_t i = to; i < rows.size(); i += W) {
        count += rows[i] >= 0;
      }
      for (Rank& rank : ranks) {
        rank.geometry[Geometry::rank_rows(W) + source * W + to] = count;
        rank.geometry[Geometry::kTokens + source] = static_cast<int32_t>(c.num_tokens[source]);
      }
    }
  }
  if (c.overflowed >= 0) {
    ranks[c.overflowed].geometry[Geometry::kOverflowed] = 1;
    ranks[c.overflowed].recv_token.clear();
  }
  return ranks;
}

RoundsInput input_of(const Case& c, const Rank& rank, int number) {
  return {number,       c.size, rank.geometry.data(), rank.recv_token.data(), rank.token_row.data(), c.slot_rows,
          c.num_rounds, nullptr};
}

// As the kernel writes it, a number after the other.
std::vector<int32_t> geometry_of(const RoundsInput& in, int round) {
  const int W = in.size;
  std::vector<int32_t> out(RoundGeometry::length(W), -12345);
  const bool one = is_one_round(in);
  const TokenRange own = range_of(in, one, round, in.rank);
  out[RoundGeometry::kFirstToken] = static_cast<int32_t>(own.first);
  out[RoundGeometry::kTooLarge] = is_too_large(in, one, round);
  for (int source = 0; source < W; ++source) {
    out[Geometry::kTokens + source] = static_cast<int32_t>(range_of(in, one, round, source).count);
    for (int chunk = 0; chunk <= kMaxChunks; ++chunk) {
      out[Geometry::chunk_rows(W) + source * (kMaxChunks + 1) + chunk] = chunk_row_of(in, one, round, source, chunk);
    }
    const int32_t first = chunk_row_of(in, one, round, source, 0);
    out[RoundGeometry::shifts(W) + in.rank * W + source] = shift_of(in, one, round, in.rank, source, first);
  }
  for (int peer = 0; peer < W; ++peer) {
    if (peer != in.rank) {
      int32_t first = 0;
      for (int64_t token = own.first + own.count - 1; token >= own.first; --token) {
        const int32_t row = in.token_row[token * W + peer];
        first = row >= 0 ? row : first;
      }
      out[RoundGeometry::shifts(W) + peer * W + in.rank] = shift_of(in, one, round, peer, in.rank, first);
    }
  }
  return out;
}

struct Staged {
  int32_t row = -1;
  int chunk = -1;
};

void fail(const Case& c, const char* what, int round, int rank) {
  std::printf("W=%d, %d rounds of %ld rows: %s (round %d, rank %d)\n", c.size, c.num_rounds,
              static_cast<long>(c.slot_rows), what, round, rank);
}

void play(const Case& c, std::mt19937& random) {
  const int W = c.size;
  const std::vector<Rank> ranks = ranks_of(c, random);
  std::vector<std::vector<int>> added(W);
  for (int rank = 0; rank < W; ++rank) {
    added[rank].assign(c.num_tokens[rank], 0);
  }
  for (int round = 0; round < c.num_rounds; ++round) {
    std::vector<std::vector<int32_t>> geometry;
    std::vector<std::vector<Staged>> staging(W, std::vector<Staged>(c.slot_rows));
    for (int rank = 0; rank < W; ++rank) {
      geometry.push_back(geometry_of(input_of(c, ranks[rank], rank), round));
      const std::vector<int32_t>& mine = geometry.back();
      if (mine[RoundGeometry::kTooLarge] != 0) {
        fail(c, "does not fit", round, rank);
      }
      for (int source = 0; source < W; ++source) {
        const int32_t* rows = mine.data() + Geometry::chunk_rows(W) + source * (kMaxChunks + 1);
        for (int chunk = 0; chunk < num_chunks(mine[Geometry::kTokens + source]) && source != rank; ++chunk) {
          for (int32_t row = rows[chunk]; row < rows[chunk + 1]; ++row) {
            const int64_t place = row - mine[RoundGeometry::shifts(W) + rank * W + source];
            if (place < 0 || place >= c.slot_rows || staging[rank][place].row >= 0) {
              fail(c, "a row has no place of its own", round, rank);
              return;
            }
            staging[rank][place] = {row, chunk};
          }
        }
      }
    }
    for (int rank = 0; rank < W; ++rank) {
      const std::vector<int32_t>& mine = geometry[rank];
      for (int source = 0; source < W; ++source) {
        if (mine[Geometry::kTokens + source] != geometry[source][Geometry::kTokens + source]) {
          fail(c, "ranks differ in the tokens of a round", round, rank);
        }
      }
      const int64_t first = mine[RoundGeometry::kFirstToken], count = mine[Geometry::kTokens + rank];
      for (int64_t i = 0; i < count; ++i) {
        ++added[rank][first + i];
        for (int peer = 0; peer < W; ++peer) {
          const int32_t row = ranks[rank].token_row[(first + i) * W + peer];
          if (row < 0 || peer == rank || peer == c.overflowed) {
            continue;
          }
          const int64_t place = row - mine[RoundGeometry::shifts(W) + peer * W + rank];
          if (place < 0 || place >= c.slot_rows || staging[peer][place].row != row ||
              staging[peer][place].chunk != i / chunk_tokens(count)) {
            fail(c, "a row is not where its token looks for it", round, rank);
            return;
          }
        }
      }
    }
  }
  for (int rank = 0; rank < W; ++rank) {
    if (std::any_of(added[rank].begin(), added[rank].end(), [](int times) { return times != 1; })) {
      fail(c, "a token is not in one round", -1, rank);
    }
  }
}

// Room for a row of every token of the other ranks, in the largest round.
int64_t enough_rows(const Case& c) {
  int64_t all = 0, least = 1 << 30;
  for (const int64_t num_tokens : c.num_tokens) {
    const int64_t most = (num_tokens + c.num_rounds - 1) / c.num_rounds;
    all += most;
    least = std::min(least, most);
  }
  return all - least;
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (const int size : {2, 3, 4, 7, 8, 16}) {
    for (const int num_rounds : {2, 3, 4, 7, 40}) {
      for (const double density : {0.02, 0.3, 0.66, 1.0}) {
        Case c = {size, num_rounds, 0, {}, density};
        for (int rank = 0; rank < size; ++rank) {
          c.num_tokens.push_back(random() % 5 == 0 ? 0 : random() % 400);
        }
        c.slot_rows = enough_rows(c);
        play(c, random);
        c.overflowed = static_cast<int>(random() % size);
        play(c, random);
        c.slot_rows = 7000;  // one of them is enough
        play(c, random);
        c.overflowed = -1;
        play(c, random);
      }
    }
  }
  Case large = {8, 3, 0, std::vector<int64_t>(8, 7000), 0.66};
  large.slot_rows = enough_rows(large);
  play(large, random);
  return 0;
}
