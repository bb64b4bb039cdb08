// A rail: the ranks with one index inside their nodes, one a node. They send each other rows in rounds, through memory
// of fixed size. N nodes, C rows that a node sends to another in a round at most; docs/design.md says what for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "exchange/exchange.h"
#include "intranode/move.h"

namespace moe_ep {

constexpr int kMaxNodes = 256;
constexpr int kHopChunks = 16;  // of the rows of one round and node: a signal each
constexpr int kHopSlots = 2;    // rounds under way

// The block of a rank, laid out alike on all: signals, then for each slot what comes from every node, then for each
// slot what goes to every node. A signal's value is a tag, (generation, round + 1), as flags have it; that of a header
// (generation, number of the opening + 1).
struct RailSignals {
  struct Header {
    int64_t words[kHeaderWords];
  };
  uint64_t arrived[kHopSlots][kMaxNodes][kHopChunks];  // written by that node's rank, behind the rows
  uint64_t taken[kMaxNodes];                           // the last round of this rank that the node has no use for
  // Openings take turns with two slots. Nobody waits for one to be free: a header of opening n + 2 is sent by a rank
  // that has the header of opening n + 1 of this one, which had read those of n by then.
  uint64_t opened[kHopSlots][kMaxNodes];  // written by that node's rank, behind its header
  Header headers[kHopSlots][kMaxNodes];
  Header sent[kHopSlots];  // of this rank, on its way
};

// Device memory of a rank. Rounds count on over calls; a call adds an even number of them, so that the slot of a round
// is known before it runs. A call that was refused adds none.
struct RailState {
  uint32_t generation;
  uint32_t round;                 // the first of the next call
  uint32_t opening;               // number of the next one
  unsigned long long sent_bytes;  // rows put to other nodes, of all calls so far
};

struct Rail {
  int node;
  int num_nodes;
  int64_t flow_bytes;  // room for what goes from one node to another in a round
  char* block;         // of this rank
  RailState* state;
  // Of the exchange inside the node: a wait here that fails is a failure of the call there.
  State* node_state;
  HostRecord* record;
  uint64_t timeout_ns;
};

// Where a slot begins in the block. A round lays the flows of all nodes side by side in it, by the bytes that it says.
inline __host__ __device__ int64_t rail_inbox(const Rail& rail, int slot) {
  return static_cast<int64_t>(sizeof(RailSignals)) + slot * rail.num_nodes * rail.flow_bytes;
}

inline __host__ __device__ int64_t rail_outbox(const Rail& rail, int slot) {
  return rail_inbox(rail, kHopSlots + slot);
}

inline __host__ __device__ int64_t rail_block_bytes(const Rail& rail) { return rail_inbox(rail, 2 * kHopSlots); }

// One round of a call, numbered from 0 within it. Its last round ends the call: the rounds count on by its number + 1.
struct RailRound {
  int number;
  int num_rounds;
  int64_t operation;         // for the record
  int64_t row_bytes;         // of all that travels with a token, side by side; a multiple of 16
  int64_t flow_bytes;        // from the rows of one node to those of the next; a multiple of 16, at most the rail's
  const int32_t* first_out;  // [N * num_rounds + 1] of the departures: where those to a node in a round begin
  const int32_t* num_in;     // [N, num_rounds] rows that come
};

// What departs: rows of this rank's tokens, or, where `token` is null, what lies in the outbox already.
struct RailRows {
  const char* x[kRowKinds];  // [T, bytes] each, rows aligned to 16 bytes
  int64_t stride_bytes[kRowKinds];
  int64_t bytes[kRowKinds];  // multiples of 16, 0 for none
  const int32_t* token;      // [departures] ascending in (node, token)
};

// What the host needs of a transport. Calls throw std::runtime_error with a sentence where CUDA refuses.
class RailTransport {
 public:
  virtual ~RailTransport() = default;
  // Opens a call of the whole EP group: the ranks of a rail tell each other their headers, then those of a node theirs
  // with what they learnt, so all come to one verdict. `call` is one of the exchange inside the node, which answers it
  // and records it as it does all calls. Unless the verdict is to go, what is launched until the next opening, here and
  // inside the node, fills its outputs and leaves: a rank that refuses need not launch it.
  virtual void open(const Call& call, cudaStream_t stream) = 0;
  // Sends the rows of a round, as soon as every node has taken the round before the last.
  virtual void send(const RailRound& round, const RailRows& rows, int num_sms, cudaStream_t stream) = 0;
  // Until every node has taken the round before the last, so that what the outbox held of it may be written over.
  virtual void wait_free(const RailRound& round, cudaStream_t stream) = 0;
  // Until the rows of a round have come from every node.
  virtual void wait(const RailRound& round, cudaStream_t stream) = 0;
  // Says that what came in a round is taken. Behind all sends of its call where it is the last round.
  virtual void take(const RailRound& round, cudaStream_t stream) = 0;
  // Until all that this rank has put and signalled, in kernels that have ended, is there: a put may be under way for
  // longer than the kernel that began it. It waits for the network alone, without a limit of its own.
  virtual void settle(cudaStream_t stream) = 0;
  // Round 0 of a generation, which must be the same on all ranks of the rail. None of its kernels may be running, and
  // what they have put is settled, on any rank: it would be written over what the new generation puts there.
  void begin_generation(uint32_t generation);
  // Bytes of rows put to other nodes in this generation; waits for the device.
  uint64_t sent_bytes() const;
  // The exchange inside the node whose calls fail where a wait here does, and the limit of every wait.
  void watch(uintptr_t node_state, uintptr_t record, double timeout_secs);
  const Rail& rail() const { return rail_; }
  // That was current when this was made; launches want it to be current.
  int device() const { return device_; }

 protected:
  RailTransport(int node, int num_nodes, int64_t flow_bytes);

  Rail rail_;
  int device_ = 0;
};

}  // namespace moe_ep
