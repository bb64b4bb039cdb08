// Low-latency dispatch and combine: every (token, expert) pair is pushed once, into memory of the rank that needs it,
// and a word beside it says so. docs/protocol.md has the rules. How a rank is reached is a hop; low_latency/device.cuh
// says what that is.
//
// W ranks, T tokens, K slots a token, H hidden, E experts, L local experts, M the most tokens of a rank, N = W * M
// places an expert, R rows received. A pair is a slot of a token, number `token * K + slot` at its source.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/row_kind.h"
#include "exchange/exchange.h"

namespace moe_ep {

// A word is made of (generation, epoch, value): equal in all but the value where it belongs to the call that looks.
// Nothing but words is ever written where words lie, so an old word never passes for a new one.
constexpr int kValueBits = 20;
constexpr int kEpochBits = 32;
constexpr uint32_t kMaxPairs = (1u << kValueBits) - 1;  // of a rank: numbers of pairs are values

constexpr int kMaxLowLatencyRanks = 128;    // where rows are put; an exchange inside a node has fewer
constexpr int kMaxLowLatencyScales = 1024;  // of a row
constexpr int kMaxLowLatencyCounts = 4096;  // W times the most experts of a rank

// Values of a greeting: what a rank says to another at the begin of a call. The low 16 bits are a fingerprint of the
// call, which must be alike on all ranks.
constexpr uint32_t kMaskedBit = 1u << 19;   // the ranks exchange no rows: the one that says it has masked the other
constexpr uint32_t kRefusedBit = 1u << 18;  // the rank refuses its arguments

// How a peer stands, in the mask of a rank.
constexpr int32_t kOpen = 0, kMasked = 1, kLost = 2;  // masked by the caller; missing after the limit

// What stands in place of a slot's rank where its row was not sent, though it should have been.
constexpr int32_t kDropped = -2;

// Memory of a rank: this block, then two slots of words, then two slots of rows; where rows are put, two more, in which
// they set out, with a part for each destination. A slot has a part for each source, and
// a rank writes into its own parts only, whatever the call: what it still writes where it is masked or lost, because it
// is slow, lies where nobody looks.
struct LowLatencyControl {
  uint64_t acks[2][kMaxLowLatencyRanks];       // by slot and reader: the call of this rank that it has finished reading
  uint64_t greetings[2][kMaxLowLatencyRanks];  // by slot and source
};
constexpr int64_t kLowLatencyControlBytes = 4096;
static_assert(sizeof(LowLatencyControl) <= kLowLatencyControlBytes, "the control block has a page");

// What only this rank's kernels look at. Zeroed, and the generation set, by the host at the begin of each generation.
struct LowLatencyState {
  uint32_t generation;
  uint32_t epoch;
  uint32_t num_sent;                      // blocks of a kernel that have sent
  uint32_t num_received[2];               // blocks of a kernel that have received, by slot: two may run at once
  uint32_t lost[2];                       // a peer was lost in the call of this slot: its results are made anew
  uint32_t is_reporting;                  // a thread fills the record
  uint64_t sent[2][kMaxLowLatencyRanks];  // by slot and peer: the call that was sent there last; its ack is awaited
  uint64_t waited_ns[2][kMaxLowLatencyRanks];  // the longest wait for each peer
};

// What went wrong in a call whose host did not wait; kind, then numbers.
enum LowLatencyFault : int { kTooManyRows = 0, kDisagreement = 1, kPeerRefused = 2 };

struct LowLatencyCall {
  World world;  // rank, size, limit, state and record; its memory is that of a node, and nothing here looks at it
  char* memory[kMaxLowLatencyRanks];  // as this GPU finds it; null where it does not, and the hop puts
  LowLatencyState* state;
  int64_t words_a_source;  // in a slot
  int64_t bytes_a_source;
  int32_t* mask;       // [W]
  int64_t* ticket;     // [1]: the epoch, from the kernel that sends to the one that receives
  uint64_t* stats;     // [W]: microseconds of waiting are added; or null
  uint32_t print;      // 16 bits
  bool enable_shrink;  // a peer that does not come is lost; otherwise the call fails
  bool sends;          // either or both
  bool receives;
};

// What is alike on all ranks.
struct LowLatencyShape {
  int hidden;
  int row_bytes;    // of a row as it travels, a multiple of 128: elements, then scales
  int num_topk;     // K
  int num_experts;  // E
  int most_local;   // the most experts that a rank has
  int max_tokens;   // M
};

enum class LowLatencyFormat : int { kAsGiven = 0, kFp8 = 1, kFp8Rounded = 2, kFp8Ue8m0 = 3 };

struct StoreHop;  // stores into the memory of every rank

// Dispatch.
struct LowLatencyDispatch {
  LowLatencyShape shape;
  LowLatencyFormat format;
  int elem_bytes;            // of x
  int64_t num_tokens;        // T
  int num_local;             // L
  const void* x;             // [T, H], rows at multiples of 16 bytes
  const void* ids;           // [T, K]
  int id_bytes;              // 4 or 8
  const int32_t* owner;      // [E]
  const int32_t* local_idx;  // [E]
  // Out. Places without a row keep what is there, but for src_info, which is -1 in them.
  char* rows;             // [L, N, H]
  void* scales;           // [L, B, N] float32, or [L, B / 4, N] int32; null if not FP8
  int32_t* recv_count;    // [L]
  int64_t* layout_range;  // [L, W]
  int32_t* src_info;      // [L, N]
  int32_t* cumulative;    // [L], or null
  int32_t* row_places;    // [1 + W * M * K, 2]: R; then, for each row, its place and `source * M * K + pair`
  int32_t* slot_rank;     // [T, K]: the rank of each slot, -1 for none, or kDropped: the expert had M rows already.
                          // Ranks that exchanged no rows with this one count as none.
};
template <typename Hop>
void launch_low_latency_dispatch(const LowLatencyCall& call, const LowLatencyDispatch& dispatch, int num_blocks,
                                 cudaStream_t stream);

// Combine: every row goes home, into the place of its pair, and the home adds up, in slot order and float32.
struct LowLatencyCombine {
  LowLatencyShape shape;
  int64_t num_tokens;         // T
  const char* rows;           // [L, N, H]
  const int32_t* row_places;  // of the dispatch
  const int32_t* slot_rank;   // of the dispatch
  const float* weights;       // [T, K]
  char* out;                  // [T, H]
};
template <typename Hop>
void launch_low_latency_combine(const LowLatencyCall& call, const LowLatencyCombine& combine, RowKind kind,
                                int num_blocks, cudaStream_t stream);

// Takes part in a call that this rank refuses: says so, reads nothing.
template <typename Hop>
void launch_low_latency_refusal(const LowLatencyCall& call, cudaStream_t stream);

// Waits, within the limit, until the peers have read what this rank sent last.
template <typename Hop>
void launch_low_latency_drain(const LowLatencyCall& call, cudaStream_t stream);

// Loads the kernels, so that no later launch does.
template <typename Hop>
void load_low_latency_dispatch();
template <typename Hop>
void load_low_latency_combine();

// A row's pieces of combine: a flag says that a part is home, a warp adds up a piece.
constexpr int kUnitBytes = 16;
constexpr int kPieceUnits = 128;
constexpr int kPartUnits = 2 * kPieceUnits;
inline __host__ __device__ int num_parts(int row_units) { return (row_units + kPartUnits - 1) / kPartUnits; }

// Words and bytes that a call needs in a slot.
inline int64_t dispatch_words(const LowLatencyShape& shape, int size) {
  return static_cast<int64_t>(size) * (shape.most_local + static_cast<int64_t>(shape.max_tokens) * shape.num_topk);
}
inline int64_t bytes_of_rows(const LowLatencyShape& shape, int size) {
  return static_cast<int64_t>(size) * shape.max_tokens * shape.num_topk * shape.row_bytes;
}
inline int64_t combine_words(const LowLatencyShape& shape, int size, int row_units) {
  return static_cast<int64_t>(size) * shape.max_tokens * shape.num_topk * num_parts(row_units);
}

}  // namespace moe_ep
