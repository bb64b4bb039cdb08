#include "common/check.h"
#include "common/float_math.cuh"
#include "common/grid.h"
#include "fp8/cast.h"
#include "fp8/math.cuh"

namespace moe_ep {
namespace {

constexpr int kBlockElems = 128;
// 16 lanes share a block, so that a lane's 8 elements of bf16 are one 16-byte load and half a warp is one reduction.
constexpr int kLanes = 16;
constexpr int kElemsPerLane = kBlockElems / kLanes;
constexpr int kThreads = 1024;
constexpr int kGroupsPerCudaBlock = kThreads / kLanes;

template <typename Elem>
struct alignas(16) Pack {
  Elem elems[kElemsPerLane];
};

struct alignas(8) PackedCodes {
  uint8_t codes[kElemsPerLane];
};

// The reads and writes of a lane. Vector: 8 neighbours, wide accesses. Scalar: every 16th element, so that any H and
// any alignment works and neighbouring lanes still touch neighbouring addresses; `num_elems` ends the last block.
template <typename Elem, bool kVector>
struct Lane {
  static __device__ void load(const Elem* block, int lane, int num_elems, float (&values)[kElemsPerLane]) {
    if constexpr (kVector) {
      if (lane * kElemsPerLane < num_elems) {
        const Pack<Elem> pack = *reinterpret_cast<const Pack<Elem>*>(block + lane * kElemsPerLane);
#pragma unroll
        for (int i = 0; i < kElemsPerLane; ++i) {
          values[i] = to_float(pack.elems[i]);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kElemsPerLane; ++i) {
      const int elem = lane + i * kLanes;
      values[i] = !kVector && elem < num_elems ? to_float(block[elem]) : 0.0f;
    }
  }

  static __device__ void store(uint8_t* block, int lane, int num_elems, const PackedCodes& packed) {
    if constexpr (kVector) {
      if (lane * kElemsPerLane < num_elems) {
        *reinterpret_cast<PackedCodes*>(block + lane * kElemsPerLane) = packed;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kElemsPerLane; ++i) {
        const int elem = lane + i * kLanes;
        if (elem < num_elems) {
          block[elem] = packed.codes[i];
        }
      }
    }
  }
};

__device__ float block_amax(const float (&values)[kElemsPerLane]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kElemsPerLane; ++i) {
    amax = larger_finite(amax, values[i]);
  }
  const unsigned int half_warp = 0xFFFFu << (threadIdx.x & 16);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(half_warp, amax, offset, kLanes));
  }
  return amax;
}

// The 1 in the launch bounds: without it ptxas (CUDA 13.0, sm_90a) saves registers for a second block and spills.
template <typename Elem, bool kVector>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_cast_kernel(const Elem* __restrict__ x, uint8_t* __restrict__ q, float* __restrict__ scales, int64_t num_tokens,
                    int64_t hidden, bool power_of_two) {
  const int64_t blocks_per_row = (hidden + kBlockElems - 1) / kBlockElems;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kGroupsPerCudaBlock;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroupsPerCudaBlock + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  // A 64-bit division costs more than a block's arithmetic: divide once, then step.
  const int64_t row_step = stride / blocks_per_row;
  const int64_t col_step = stride % blocks_per_row;
  int64_t row = first / blocks_per_row;
  int64_t col = first % blocks_per_row;
  while (row < num_tokens) {
    const int64_t offset = row * hidden + col * kBlockElems;
    const int num_elems = static_cast<int>(min(static_cast<int64_t>(kBlockElems), hidden - col * kBlockElems));
    float values[kElemsPerLane];
    Lane<Elem, kVector>::load(x + offset, lane, num_elems, values);
    const float scale = block_scale(block_amax(values), power_of_two);
    const float inverse_scale = __frcp_rn(scale);
    PackedCodes packed;
#pragma unroll
    for (int i = 0; i < kElemsPerLane; ++i) {
      packed.codes[i] = to_e4m3(values[i], inverse_scale);
    }
    Lane<Elem, kVector>::store(q + offset, lane, num_elems, packed);
    if (lane == 0) {
      scales[row * blocks_per_row + col] = scale;
    }
    row += row_step;
    col += col_step;
    if (col >= blocks_per_row) {
      col -= blocks_per_row;
      ++row;
    }
  }
}

bool is_aligned(const void* pointer, size_t num_bytes) { return reinterpret_cast<uintptr_t>(pointer) % num_bytes == 0; }

template <typename Elem>
void launch(const void* x, void* q, float* scales, int64_t num_tokens, int64_t hidden, bool power_of_two, int num_sms,
            cudaStream_t stream) {
  // H % 8 == 0 keeps every row and every block as aligned as the base pointers.
  const bool vector =
      hidden % kElemsPerLane == 0 && is_aligned(x, alignof(Pack<Elem>)) && is_aligned(q, alignof(PackedCodes));
  const auto kernel = vector ? fp8_cast_kernel<Elem, true> : fp8_cast_kernel<Elem, false>;
  const int64_t num_blocks = num_tokens * ((hidden + kBlockElems - 1) / kBlockElems);
  kernel<<<grid_size(num_blocks, kGroupsPerCudaBlock, num_sms), kThreads, 0, stream>>>(
      static_cast<const Elem*>(x), static_cast<uint8_t*>(q), scales, num_tokens, hidden, power_of_two);
  check_cuda(cudaGetLastError(), "fp8_cast_1x128: the launch");
}

}  // namespace

void launch_fp8_cast_1x128(const void* x, RowType row_type, void* q, float* scales, int64_t num_tokens, int64_t hidden,
                           bool power_of_two, int num_sms, cudaStream_t stream) {
  MOE_EP_CHECK(num_tokens >= 0 && hidden >= 1, "fp8_cast_1x128: x is [", num_tokens, ", ", hidden,
               "], but at least [0, 1] is needed: give the shape of x.");
  MOE_EP_CHECK(num_sms >= 1, "fp8_cast_1x128: num_sms is ", num_sms, ", but the least is 1: give the SM budget.");
  if (num_tokens == 0) {
    return;
  }
  switch (row_type) {
    case RowType::kBFloat16:
      return launch<__nv_bfloat16>(x, q, scales, num_tokens, hidden, power_of_two, num_sms, stream);
    case RowType::kFloat16:
      return launch<__half>(x, q, scales, num_tokens, hidden, power_of_two, num_sms, stream);
    case RowType::kFloat32:
      return launch<float>(x, q, scales, num_tokens, hidden, power_of_two, num_sms, stream);
  }
}

}  // namespace moe_ep
