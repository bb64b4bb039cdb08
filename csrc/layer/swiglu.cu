#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "common/check.h"
#include "common/device_limits.h"
#include "common/float_math.cuh"
#include "common/grid.h"
#include "common/warp.cuh"
#include "layer/swiglu.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 4;
constexpr int kVectorBytes = 16;

template <typename Elem, int kElems>
struct alignas(sizeof(Elem) * kElems) Pack {
  Elem elems[kElems];
};

// Walks over the packs of a grid-wide loop by row and column. A 64-bit division costs more than a pack's arithmetic:
// divide once, then step.
class PackWalk {
 public:
  __device__ PackWalk(int64_t packs_per_row) : packs_per_row_(packs_per_row) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    row = first / packs_per_row;
    col = first % packs_per_row;
    row_step_ = stride / packs_per_row;
    col_step_ = stride % packs_per_row;
  }

  __device__ void step() {
    row += row_step_;
    col += col_step_;
    if (col >= packs_per_row_) {
      col -= packs_per_row_;
      ++row;
    }
  }

  int64_t row;
  int64_t col;

 private:
  int64_t packs_per_row_;
  int64_t row_step_;
  int64_t col_step_;
};

__device__ int64_t rows_that_count(const int32_t* num_rows_device, int64_t num_rows) {
  return num_rows_device == nullptr ? num_rows : min(static_cast<int64_t>(*num_rows_device), num_rows);
}

// `row_weights` may be null: 1 everywhere.
template <typename Elem, int kElems>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const Pack<Elem, kElems>* __restrict__ projected, const float* __restrict__ row_weights,
                  Pack<Elem, kElems>* __restrict__ out, const int32_t* __restrict__ num_rows_device, int64_t num_rows,
                  int64_t packs_per_row) {
  const int64_t num_real = rows_that_count(num_rows_device, num_rows);
  for (PackWalk at(packs_per_row); at.row < num_rows; at.step()) {
    Pack<Elem, kElems> result = {};
    if (at.row < num_real) {
      const Pack<Elem, kElems>* source = projected + at.row * 2 * packs_per_row + at.col;
      const Pack<Elem, kElems> gates = source[0];
      const Pack<Elem, kElems> ups = source[packs_per_row];
      const float weight = row_weights == nullptr ? 1.0f : row_weights[at.row];
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        const float gate = to_float(gates.elems[i]);
        result.elems[i] = from_float<Elem>(gate * sigmoid<Elem>(gate) * to_float(ups.elems[i]) * weight);
      }
    }
    out[at.row * packs_per_row + at.col] = result;
  }
}

template <typename Elem, int kElems>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const Pack<Elem, kElems>* __restrict__ projected,
                           const Pack<Elem, kElems>* __restrict__ grad_out,
                           Pack<Elem, kElems>* __restrict__ grad_projected, const int32_t* __restrict__ num_rows_device,
                           int64_t num_rows, int64_t packs_per_row) {
  const int64_t num_real = rows_that_count(num_rows_device, num_rows);
  for (PackWalk at(packs_per_row); at.row < num_rows; at.step()) {
    const int64_t offset = at.row * 2 * packs_per_row + at.col;
    Pack<Elem, kElems> grad_gates = {};
    Pack<Elem, kElems> grad_ups = {};
    if (at.row < num_real) {
      const Pack<Elem, kElems> gates = projected[offset];
      const Pack<Elem, kElems> ups = projected[offset + packs_per_row];
      const Pack<Elem, kElems> grads = grad_out[at.row * packs_per_row + at.col];
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        const float gate = to_float(gates.elems[i]);
        const float grad = to_float(grads.elems[i]);
        const float s = sigmoid<Elem>(gate);
        grad_gates.elems[i] = from_float<Elem>(grad * to_float(ups.elems[i]) * s * (1.0f + gate * (1.0f - s)));
        grad_ups.elems[i] = from_float<Elem>(grad * (gate * s));
      }
    }
    grad_projected[offset] = grad_gates;
    grad_projected[offset + packs_per_row] = grad_ups;
  }
}

// A warp a row, for the sum over it.
template <typename Elem, int kElems>
__global__ void __launch_bounds__(kThreads)
    weighted_swiglu_backward_kernel(const Pack<Elem, kElems>* __restrict__ projected,
                                    const float* __restrict__ row_weights,
                                    const Pack<Elem, kElems>* __restrict__ grad_out,
                                    Pack<Elem, kElems>* __restrict__ grad_projected, float* __restrict__ grad_weights,
                                    const int32_t* __restrict__ num_rows_device, int64_t num_rows,
                                    int64_t packs_per_row) {
  constexpr int kWarps = kThreads / 32;
  const int64_t num_real = rows_that_count(num_rows_device, num_rows);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + warp_idx();
  const int lane = lane_idx();
  for (int64_t row = first; row < num_rows; row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const bool is_real = row < num_real;
    const float weight = is_real ? row_weights[row] : 0.0f;
    float sum = 0.0f;
    for (int64_t col = lane; col < packs_per_row; col += 32) {
      const int64_t offset = row * 2 * packs_per_row + col;
      Pack<Elem, kElems> grad_gates = {};
      Pack<Elem, kElems> grad_ups = {};
      if (is_real) {
        const Pack<Elem, kElems> gates = projected[offset];
        const Pack<Elem, kElems> ups = projected[offset + packs_per_row];
        const Pack<Elem, kElems> grads = grad_out[row * packs_per_row + col];
#pragma unroll
        for (int i = 0; i < kElems; ++i) {
          const float gate = to_float(gates.elems[i]);
          const float up = to_float(ups.elems[i]);
          const float grad = to_float(grads.elems[i]);
          const float s = sigmoid<Elem>(gate);
          sum += grad * (gate * s * up);
          grad_gates.elems[i] = from_float<Elem>(grad * weight * up * s * (1.0f + gate * (1.0f - s)));
          grad_ups.elems[i] = from_float<Elem>(grad * weight * (gate * s));
        }
      }
      grad_projected[offset] = grad_gates;
      grad_projected[offset + packs_per_row] = grad_ups;
    }
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    }
    if (lane == 0) {
      grad_weights[row] = sum;
    }
  }
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    zero_tail_kernel(Unit* rows, const int32_t* __restrict__ num_rows_device, int64_t num_rows, int64_t units_per_row) {
  const int64_t end = num_rows * units_per_row;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t begin = max(static_cast<int64_t>(*num_rows_device), int64_t{0}) * units_per_row;
  for (int64_t i = begin + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < end; i += stride) {
    rows[i] = Unit{};
  }
}

bool are_aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % kVectorBytes != 0) {
      return false;
    }
  }
  return true;
}

unsigned int swiglu_grid(int64_t num_packs, int num_sms) {
  return grid_size(num_packs, kThreads, num_sms > 0 ? num_sms : kBlocksPerSm * device_sms());
}

template <typename Elem, int kElems>
void launch_forward(const void* projected, const float* row_weights, void* out, const int32_t* num_rows_device,
                    int64_t num_rows, int64_t ffn, int num_sms, cudaStream_t stream) {
  using Packed = Pack<Elem, kElems>;
  const int64_t packs_per_row = ffn / kElems;
  swiglu_kernel<Elem, kElems><<<swiglu_grid(num_rows * packs_per_row, num_sms), kThreads, 0, stream>>>(
      static_cast<const Packed*>(projected), row_weights, static_cast<Packed*>(out), num_rows_device, num_rows,
      packs_per_row);
  check_cuda(cudaGetLastError(), "swiglu: the launch");
}

template <typename Elem, int kElems>
void launch_backward(const void* projected, const void* grad_out, void* grad_projected, const int32_t* num_rows_device,
                     int64_t num_rows, int64_t ffn, int num_sms, cudaStream_t stream) {
  using Packed = Pack<Elem, kElems>;
  const int64_t packs_per_row = ffn / kElems;
  swiglu_backward_kernel<Elem, kElems><<<swiglu_grid(num_rows * packs_per_row, num_sms), kThreads, 0, stream>>>(
      static_cast<const Packed*>(projected), static_cast<const Packed*>(grad_out), static_cast<Packed*>(grad_projected),
      num_rows_device, num_rows, packs_per_row);
  check_cuda(cudaGetLastError(), "swiglu_backward: the launch");
}

template <typename Elem, int kElems>
void launch_weighted_backward(const void* projected, const float* row_weights, const void* grad_out,
                              void* grad_projected, float* grad_weights, const int32_t* num_rows_device,
                              int64_t num_rows, int64_t ffn, int num_sms, cudaStream_t stream) {
  using Packed = Pack<Elem, kElems>;
  weighted_swiglu_backward_kernel<Elem, kElems><<<swiglu_grid(num_rows * 32, num_sms), kThreads, 0, stream>>>(
      static_cast<const Packed*>(projected), row_weights, static_cast<const Packed*>(grad_out),
      static_cast<Packed*>(grad_projected), grad_weights, num_rows_device, num_rows, ffn / kElems);
  check_cuda(cudaGetLastError(), "weighted_swiglu_backward: the launch");
}

// Calls launch(elem, elems) with an element type and the number of elements of an access, as values of types.
template <typename Launch>
void with_pack(RowType row_type, int64_t ffn, bool aligned, const Launch& launch) {
  const auto with_elem = [&](auto elem) {
    constexpr int kElems = kVectorBytes / sizeof(elem);
    if (aligned && ffn % kElems == 0) {
      launch(elem, std::integral_constant<int, kElems>());
    } else {
      launch(elem, std::integral_constant<int, 1>());
    }
  };
  switch (row_type) {
    case RowType::kBFloat16:
      return with_elem(__nv_bfloat16());
    case RowType::kFloat16:
      return with_elem(__half());
    case RowType::kFloat32:
      return with_elem(float());
  }
}

void check_sizes(const char* what, int64_t num_rows, int64_t row_size, int num_sms) {
  MOE_EP_CHECK(num_rows >= 0 && row_size >= 1, what, ": the rows are [", num_rows, ", ", row_size,
               "], but at least [0, 1] is needed: give their shape.");
  MOE_EP_CHECK(num_sms >= 0, what, ": num_sms is ", num_sms, ", but the least is 0 (all): give the SM budget.");
}

}  // namespace

void launch_swiglu(const void* projected, RowType row_type, void* out, const int32_t* num_rows_device, int64_t num_rows,
                   int64_t ffn, int num_sms, cudaStream_t stream) {
  check_sizes("swiglu", num_rows, ffn, num_sms);
  if (num_rows == 0) {
    return;
  }
  with_pack(row_type, ffn, are_aligned({projected, out}), [&](auto elem, auto elems) {
    launch_forward<decltype(elem), elems.value>(projected, nullptr, out, num_rows_device, num_rows, ffn, num_sms,
                                                stream);
  });
}

void launch_weighted_swiglu(const void* projected, const float* row_weights, RowType row_type, void* out,
                            const int32_t* num_rows_device, int64_t num_rows, int64_t ffn, int num_sms,
                            cudaStream_t stream) {
  check_sizes("weighted_swiglu", num_rows, ffn, num_sms);
  if (num_rows == 0) {
    return;
  }
  with_pack(row_type, ffn, are_aligned({projected, out}), [&](auto elem, auto elems) {
    launch_forward<decltype(elem), elems.value>(projected, row_weights, out, num_rows_device, num_rows, ffn, num_sms,
                                                stream);
  });
}

void launch_swiglu_backward(const void* projected, const void* grad_out, RowType row_type, void* grad_projected,
                            const int32_t* num_rows_device, int64_t num_rows, int64_t ffn, int num_sms,
                            cudaStream_t stream) {
  check_sizes("swiglu_backward", num_rows, ffn, num_sms);
  if (num_rows == 0) {
    return;
  }
  with_pack(row_type, ffn, are_aligned({projected, grad_out, grad_projected}), [&](auto elem, auto elems) {
    launch_backward<decltype(elem), elems.value>(projected, grad_out, grad_projected, num_rows_device, num_rows, ffn,
                                                 num_sms, stream);
  });
}

void launch_weighted_swiglu_backward(const void* projected, const float* row_weights, const void* grad_out,
                                     RowType row_type, void* grad_projected, float* grad_weights,
                                     const int32_t* num_rows_device, int64_t num_rows, int64_t ffn, int num_sms,
                                     cudaStream_t stream) {
  check_sizes("weighted_swiglu_backward", num_rows, ffn, num_sms);
  if (num_rows == 0) {
    return;
  }
  with_pack(row_type, ffn, are_aligned({projected, grad_out, grad_projected}), [&](auto elem, auto elems) {
    launch_weighted_backward<decltype(elem), elems.value>(projected, row_weights, grad_out, grad_projected,
                                                          grad_weights, num_rows_device, num_rows, ffn, num_sms,
                                                          stream);
  });
}

void launch_zero_tail(void* rows, const int32_t* num_rows_device, int64_t num_rows, int64_t row_bytes, int num_sms,
                      cudaStream_t stream) {
  check_sizes("zero_tail", num_rows, row_bytes, num_sms);
  if (num_rows == 0) {
    return;
  }
  if (row_bytes % kVectorBytes == 0 && are_aligned({rows})) {
    const int64_t units = row_bytes / kVectorBytes;
    zero_tail_kernel<<<swiglu_grid(num_rows * units, num_sms), kThreads, 0, stream>>>(static_cast<int4*>(rows),
                                                                                      num_rows_device, num_rows, units);
  } else {
    zero_tail_kernel<<<swiglu_grid(num_rows * row_bytes, num_sms), kThreads, 0, stream>>>(
        static_cast<uint8_t*>(rows), num_rows_device, num_rows, row_bytes);
  }
  check_cuda(cudaGetLastError(), "zero_tail: the launch");
}

}  // namespace moe_ep
