#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/check.h"
#include "common/row_math.cuh"
#include "exchange/device.cuh"
#include "intranode/small.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kPortions = 32;  // the same on all ranks; a flag each

template <typename T>
struct Arithmetic {
  using Wide = T;
  __device__ static Wide wide(T value) { return value; }
  __device__ static T narrow_to(Wide value) { return value; }
  __device__ static Wide add(Wide a, Wide b) { return a + b; }
};

template <>
struct Arithmetic<__nv_bfloat16> {
  using Wide = float;
  __device__ static Wide wide(__nv_bfloat16 value) { return __bfloat162float(value); }
  __device__ static __nv_bfloat16 narrow_to(Wide value) { return __float2bfloat16_rn(value); }
  __device__ static Wide add(Wide a, Wide b) { return a + b; }
};

template <>
struct Arithmetic<__half> {
  using Wide = float;
  __device__ static Wide wide(__half value) { return __half2float(value); }
  __device__ static __half narrow_to(Wide value) { return __float2half_rn(value); }
  __device__ static Wide add(Wide a, Wide b) { return a + b; }
};

template <typename T>
__device__ uint64_t not_a_number() {
  return sizeof(T) == 8 ? 0x7FF8000000000000ull : 0x7FC000007FC00000ull;
}

// By a whole block: this rank's portion can be read.
__device__ void post_portion(const World& world, const Turn& turn, int portion) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < world.size) {
    __threadfence_system();
    post_flag(world, turn, threadIdx.x, portion);
  }
}

// By a whole block: until portions [first, end) of every rank can be read.
__device__ bool portions_arrived(const World& world, const Turn& turn, int first, int end) {
  __shared__ bool shared_arrived;
  __syncthreads();
  if (threadIdx.x < 32) {
    bool arrived = true;
    const int count = end - first;
    for (int i = threadIdx.x; i < world.size * count && arrived; i += 32) {
      const uint64_t* flag = &world.control[world.rank]->flags[i / count][turn.slot][first + i % count];
      arrived = wait_word(world, turn, i / count, kWaitFlag, flag, turn.tag);
    }
    arrived = __all_sync(kFullWarp, arrived);
    if (threadIdx.x == 0) {
      shared_arrived = arrived;
    }
  }
  __syncthreads();
  return shared_arrived;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    moe_ep_numbers_home(const __grid_constant__ Call call, const __grid_constant__ NumbersInput in) {
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const uint32_t verdict = open_call(call, turn);
  const int num_topk = in.num_topk;
  const bool overflowed = in.geometry[Geometry::kOverflowed] != 0;
  while (verdict == kGo) {
    const uint32_t ticket = block_ticket(world.state);
    if (ticket >= 2 * kPortions) {
      break;
    }
    const int portion = ticket % kPortions;
    if (ticket < kPortions) {
      T* staging = reinterpret_cast<T*>(slot_of(world, world.rank, turn));
      // Of an overflow every row that the slot holds is NaN; the peers know that those behind it are.
      const int64_t num_held = world.slot_bytes / (num_topk * static_cast<int64_t>(sizeof(T)));
      const int64_t count =
          min64(overflowed ? num_held : in.num_compact_rows, in.geometry[Geometry::kCompactRows]) * num_topk;
      for (int64_t i = count * portion / kPortions + threadIdx.x; i < count * (portion + 1) / kPortions;
           i += kThreads) {
        if (overflowed) {
          staging[i] = T(__int_as_float(0x7FC00000));
          continue;
        }
        const int64_t at = in.pair_row == nullptr ? i : in.pair_row[i];
        staging[i] = at < 0 ? T(0.0f) : static_cast<const T*>(in.numbers)[at];
      }
      post_portion(world, turn, portion);
      continue;
    }
    if (!portions_arrived(world, turn, 0, kPortions)) {
      break;
    }
    const int64_t count = in.num_tokens * num_topk;
    for (int64_t i = count * portion / kPortions + threadIdx.x; i < count * (portion + 1) / kPortions; i += kThreads) {
      const int64_t token = i / num_topk;
      const auto from = [&](int rank) {
        const volatile T* staging = reinterpret_cast<const volatile T*>(slot_of(world, rank, turn));
        const int64_t row = in.token_row[token * world.size + rank];
        if ((row + 1) * num_topk * static_cast<int64_t>(sizeof(T)) > world.slot_bytes) {
          return T(__int_as_float(0x7FC00000));
        }
        return T(staging[row * num_topk + i % num_topk]);
      };
      T total = 0;
      if (in.sums) {
        bool is_first = true;
        for (int rank = 0; rank < world.size; ++rank) {
          if (in.token_row[token * world.size + rank] >= 0) {
            total = is_first ? from(rank) : sum(total, from(rank));
            is_first = false;
          }
        }
      } else if (in.slot_rank[i] >= 0) {
        total = from(static_cast<int>(in.slot_rank[i]));
      }
      static_cast<T*>(in.out)[i] = total;
    }
  }
  const Output output = {in.out, in.num_tokens * num_topk * static_cast<int64_t>(sizeof(T)), not_a_number<T>()};
  if (is_last_block(world.state)) {
    if (verdict == kGo && in.geometry[Geometry::kNoPlan] != 0) {
      fill_output(output);
    }
    close_call(call, turn, verdict, &output, 1, false);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    moe_ep_all_reduce(const __grid_constant__ Call call, const T* in, T* out, int64_t count, uint64_t poison) {
  using Math = Arithmetic<T>;
  const World& world = call.world;
  const Turn turn = turn_of(world);
  const uint32_t verdict = open_call(call, turn);
  while (verdict == kGo) {
    const uint32_t ticket = block_ticket(world.state);
    if (ticket >= 2 * kPortions) {
      break;
    }
    const int portion = ticket % kPortions;
    const int64_t first = count * portion / kPortions, end = count * (portion + 1) / kPortions;
    if (ticket < kPortions) {
      T* staging = reinterpret_cast<T*>(slot_of(world, world.rank, turn));
      for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
        staging[i] = in[i];
      }
      post_portion(world, turn, portion);
      continue;
    }
    if (!portions_arrived(world, turn, portion, portion + 1)) {
      break;
    }
    for (int64_t i = first + threadIdx.x; i < end; i += kThreads) {
      typename Math::Wide total = 0;
      for (int rank = 0; rank < world.size; ++rank) {
        const T* staging = reinterpret_cast<const T*>(slot_of(world, rank, turn));
        total = Math::add(total, Math::wide(staging[i]));
      }
      out[i] = Math::narrow_to(total);
    }
  }
  const Output output = {out, count * static_cast<int64_t>(sizeof(T)), poison};
  end_call(call, turn, verdict, &output, 1);
}

__global__ void moe_ep_header_only(const __grid_constant__ Call call) {
  const Turn turn = turn_of(call.world);
  const uint32_t verdict = open_call(call, turn);
  end_call(call, turn, verdict, nullptr, 0);
}

__global__ void moe_ep_done_only(const __grid_constant__ Call call) {
  const Turn turn = turn_of(call.world);
  end_call(call, turn, kGo, nullptr, 0);
}

__global__ void moe_ep_drain(const __grid_constant__ Call call) {
  const World& world = call.world;
  const Turn turn = turn_of(world);
  if (world.state->failed == 0 && threadIdx.x < static_cast<unsigned int>(world.size)) {
    wait_done(world, turn, threadIdx.x, static_cast<int64_t>(turn.epoch) - 1);
  }
}

}  // namespace

void launch_numbers_home(const Call& call, const NumbersInput& input, Number kind, int num_sms, cudaStream_t stream) {
  if (kind == Number::kFloat64) {
    moe_ep_numbers_home<double><<<num_sms, kThreads, 0, stream>>>(call, input);
  } else {
    MOE_EP_CHECK(kind == Number::kFloat32, "weights are float32 or float64: convert them.");
    moe_ep_numbers_home<float><<<num_sms, kThreads, 0, stream>>>(call, input);
  }
  check_cuda(cudaGetLastError(), "weights: the launch");
}

void launch_all_reduce(const Call& call, const void* in, void* out, int64_t count, Number kind, int num_sms,
                       cudaStream_t stream) {
  const auto launch = [&](auto zero, uint64_t poison) {
    using T = decltype(zero);
    moe_ep_all_reduce<T>
        <<<num_sms, kThreads, 0, stream>>>(call, static_cast<const T*>(in), static_cast<T*>(out), count, poison);
  };
  switch (kind) {
    case Number::kFloat32:
      launch(float(), 0x7FC000007FC00000ull);
      break;
    case Number::kFloat64:
      launch(double(), 0x7FF8000000000000ull);
      break;
    case Number::kInt32:
      launch(int32_t(), ~0ull);
      break;
    case Number::kInt64:
      launch(int64_t(), ~0ull);
      break;
    case Number::kBFloat16:
      launch(__nv_bfloat16(), 0x7FC07FC07FC07FC0ull);
      break;
    case Number::kFloat16:
      launch(__half(), 0x7E007E007E007E00ull);
      break;
  }
  check_cuda(cudaGetLastError(), "all_reduce: the launch");
}

void launch_header_only(const Call& call, cudaStream_t stream) {
  moe_ep_header_only<<<1, 32, 0, stream>>>(call);
  check_cuda(cudaGetLastError(), "header: the launch");
}

void launch_done_only(const Call& call, cudaStream_t stream) {
  moe_ep_done_only<<<1, 32, 0, stream>>>(call);
  check_cuda(cudaGetLastError(), "done: the launch");
}

void launch_drain(const Call& call, cudaStream_t stream) {
  moe_ep_drain<<<1, 32, 0, stream>>>(call);
  check_cuda(cudaGetLastError(), "drain: the launch");
}

}  // namespace moe_ep
