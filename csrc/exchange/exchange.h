// What the ranks of one node share for an exchange, and what a call of it is given. docs/protocol.md has the rules of
// the flags; the numbers in comments here are those of its list. W ranks, T tokens, K slots a token, L local experts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moe_ep {

constexpr int kMaxRanks = 16;
constexpr int kMaxTopk = 64;
constexpr int kMaxBlocks = 8;
constexpr int kMaxLocalExperts = 2048;  // L; a plan counts them in shared memory

// The tokens of a source are cut into chunks, a chunk into parts; a flag says that a part can be read. A source's T
// alone decides where the cuts lie, so every rank computes the same ones.
constexpr int kMaxChunks = 64;
constexpr int kParts = 8;
constexpr int kMinChunkTokens = 32;
constexpr int kNumFlags = kMaxChunks * kParts;

// A header: words that must be alike on all ranks (as many as the call says), then each rank's own. Those with a name
// here are set or read by number; moe_ep/backends/node_header.py packs them all, and a test compares the numbers.
constexpr int kHeaderWords = 32;
constexpr int kOperationWord = 0;
constexpr int kHandleWord = 2;
constexpr int kHiddenWord = 3;
constexpr int kDtypeWord = 6;
constexpr int kWeightsDtypeWord = 7;
constexpr int kExactWord = 10;
constexpr int kRoundsWord = 14;
// Of the header that opens a call between nodes (csrc/internode/rail.h); 0 in all others.
constexpr int kOpeningWord = 15;    // its number, from 1; where there is one node, any
constexpr int kElsewhereWord = 16;  // 1 + the node in which the rank of the sender's rail refuses, or differs; and,
                                    // kElsewhereFieldShift higher, the number of the word that differs there ...
constexpr int kElsewhereValueWord = 17;  // ... and its value
constexpr int kElsewhereFieldShift = 16;
constexpr int kOverflowedWord = 19;   // this rank received more rows than max_rows: whatever it would send is lost
constexpr int kRegisteredWord = 20;   // numbers of the blocks that rows (low byte) and scales (next) lie in for peers
                                      // to read, 0 for none; then offset and stride of rows and of scales, bytes
constexpr int kNeedWord = 25;         // bytes that this rank puts into its slot
constexpr int kFirstOffsetWord = 26;  // in this rank's slot, bytes
constexpr int kSecondOffsetWord = 27;
constexpr int kStatusWord = 28;
constexpr int kXNeedsGradWord = 29;
constexpr int kWeightsNeedGradWord = 30;
constexpr int kTokensWord = 31;

// Status of a rank: kFine, the number of an error class (moe_ep/backends/header.py), or one of these.
constexpr int64_t kFine = 0;
constexpr int64_t kDoesNotFit = 100;
constexpr int64_t kDiffersElsewhere = 101;  // from the rank of its rail in another node

// Written by s: headers[s][slot], done[s], abort[s], flags[s][slot]. Zeroed once, before its handle is given away.
struct Control {
  struct Header {
    uint64_t tag;
    int64_t words[kHeaderWords];
  } headers[kMaxRanks][2];
  uint64_t done[kMaxRanks];
  uint64_t abort[kMaxRanks];
  uint64_t flags[kMaxRanks][2][kNumFlags];
};

// A rank's own device memory: the host sets generation and epoch between calls, the last block of a call advances.
struct State {
  uint32_t generation;
  uint32_t epoch;
  uint32_t failed;   // a wait timed out, or a peer gave up: calls leave at once until a new generation (14)
  uint32_t verdict;  // of the first kernel of a plan, for its second
  uint32_t refused;  // the call between nodes that was opened last: its parts leave at once, on all ranks alike
  uint32_t outcome;  // verdict of the last call that has ended, kFailed included
  uint32_t next_ticket;
  uint32_t num_finished;  // blocks
  uint32_t num_published;
  uint32_t num_counted;
  uint64_t bad_slot;  // first slot with an id outside [-1, E), or ~0
  // What the chunks of a plan add up to. Whoever takes the sums leaves zeros.
  struct Sums {
    int32_t experts[kMaxLocalExperts];         // pairs for each local expert
    int32_t rank_rows[kMaxRanks * kMaxRanks];  // compact rows from rank i to rank j at [i * W + j]
    int32_t pairs[kMaxRanks];                  // from each rank
  } sums;
};

enum Verdict : uint32_t { kGo = 0, kRefuse = 1, kDisagree = 2, kGrow = 3, kFailed = 4 };

// What a wait is for; moe_ep/backends/device_faults.py names them in this order.
enum Phase : int {
  kWaitDone = 0,
  kWaitHeader = 1,
  kWaitFlag = 2,
  kWaitTicket = 3,
  kSawAbort = 4,
  kWaitRoundRows = 5,   // between nodes: the peer is a node
  kWaitRoundTaken = 6,  // the same
  kWaitOpening = 7,     // the same
};

constexpr int kMaxHostCounts = 1 << 14;

// Mapped host memory. The device fills a record and then sets `valid`, the host reads it and clears `valid`.
struct HostRecord {
  struct Fault {
    uint64_t valid;
    int64_t values[8];
  };
  uint64_t answered;  // number of the newest call whose host waits; set last
  uint64_t verdict;
  uint64_t epoch;
  int64_t num_compact_rows;
  int64_t num_rows;
  int64_t bad_slot;  // -1 for none
  int64_t bad_id;
  int64_t x_needs_grad, weights_need_grad;  // of any rank
  int64_t rank_tokens[kMaxRanks];
  int64_t rank_rows[kMaxRanks][kMaxRanks];
  int64_t recv_pairs[kMaxRanks];
  int64_t headers[kMaxRanks][kHeaderWords];  // of the newest refused call with a question
  Fault timeout;                             // peer, phase, epoch, expected, seen, operation
  Fault refused;                             // verdict, epoch: of the first one that the host has not taken
  Fault overflow;                            // rows received, max_rows
  Fault bad_idx;                             // slot, id, K, E
  Fault low_latency;                         // kind (csrc/low_latency/low_latency.h), operation, and what the kind says
  int64_t refused_headers[kMaxRanks][kHeaderWords];  // of `refused`
  uint64_t num_refused;                              // calls of this generation, counted by the device
  uint64_t num_refusals_taken;                       // those that the host knows of, counted by it
  int32_t expert_counts[kMaxHostCounts];             // of a plan whose host waits
};

struct World {
  int rank;
  int size;
  int64_t operation;  // of this call, for the record
  uint64_t timeout_ns;
  int64_t slot_bytes;  // the segment holds two slots
  State* state;
  HostRecord* record;  // as the device sees it
  Control* control[kMaxRanks];
  char* segment[kMaxRanks];
  char* blocks[kMaxBlocks][kMaxRanks];  // memory that callers write into and peers read
};

struct Call {
  World world;
  int64_t header[kHeaderWords];
  int num_match;      // header words that must be alike
  uint64_t question;  // the host waits for `answered` to become it; 0 where it does not wait
};

// What fills an output where a call gives its rows up: `pattern` is NaN in the dtype, repeated.
struct Output {
  void* data;
  int64_t num_bytes;
  uint64_t pattern;
};

// Places in the int32 geometry of a handle, as it lies on the device.
struct Geometry {
  static constexpr int kCompactRows = 0, kRows = 1, kOverflowed = 2, kNoPlan = 3, kTokens = 4;
  static __host__ __device__ int rank_rows(int size) { return kTokens + size; }
  // Compact row at which chunk c of source s begins: [W, kMaxChunks + 1].
  static __host__ __device__ int chunk_rows(int size) { return rank_rows(size) + size * size; }
  static __host__ __device__ int expert_offsets(int size) { return chunk_rows(size) + size * (kMaxChunks + 1); }
  static __host__ __device__ int expert_counts(int size, int num_local) { return expert_offsets(size) + num_local + 1; }
  static __host__ __device__ int length(int size, int num_local) { return expert_counts(size, num_local) + num_local; }
};

// Places in the geometry of one round of a combine, which is a range of tokens of every source. Tokens and chunk rows
// are those of the range, at their places of `Geometry`; what a combine does not need makes room for other numbers.
struct RoundGeometry {
  static constexpr int kFirstToken = Geometry::kCompactRows;  // of this rank's range
  static constexpr int kTooLarge = Geometry::kRows;           // this rank's slot cannot hold the rows of the round
  // How much less than its compact row the place of a row for source s is in the staging of rank r: [W, W] at [r, s].
  // A rank has those of its own staging, and those of its own tokens in the others'.
  static __host__ __device__ int shifts(int size) { return Geometry::rank_rows(size); }
  static __host__ __device__ int length(int size) { return Geometry::expert_offsets(size); }
};

inline __host__ __device__ int64_t chunk_tokens(int64_t num_tokens) {
  const int64_t even = (num_tokens + kMaxChunks - 1) / kMaxChunks;
  return even <= kMinChunkTokens ? kMinChunkTokens : (even + kParts - 1) / kParts * kParts;
}

inline __host__ __device__ int num_chunks(int64_t num_tokens) {
  const int64_t size = chunk_tokens(num_tokens);
  return static_cast<int>((num_tokens + size - 1) / size);
}

// `input` for a launch with so many tickets in hand at a time: `lead` says how many steps publishing runs ahead of the
// pulls that wait for it, as many as are under way together and a third more, since they do not end in their order.
// Ranks need not agree on it: a wait for a chunk ends in the end at a chunk that nothing is waited for (8, 9). Where
// nobody waits for this rank there is no lead.
template <typename Input>
inline Input with_lead(const Input& input, const World& world, int num_in_hand) {
  const int steps = (4 * num_in_hand + 3 * kParts * world.size - 1) / (3 * kParts * world.size);
  Input out = input;
  out.lead = world.size == 1 || input.is_registered ? 0 : steps < kMaxChunks ? steps : kMaxChunks;
  return out;
}

inline __host__ __device__ int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace moe_ep
