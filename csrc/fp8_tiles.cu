#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "check.h"
#include "fp8_math.cuh"
#include "fp8_tiles.h"

namespace moe_ep {
namespace {

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRowsPerWarp = kTile / kWarps;
constexpr int kPerLane = kTile / kWarpSize;  // neighbouring elements of a row
constexpr int kBatch = 4;                    // rows of which a warp has the loads in flight
constexpr int kRun = 16;                     // rows of a transposed store: 16 bytes
constexpr int kStep = 16;                    // what widths and numbers of rows are multiples of

__device__ float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float widened(float value) { return value; }

template <typename Elem>
__device__ Elem narrowed(float value) {
  if constexpr (sizeof(Elem) == 4) {
    return value;
  } else {
    return __float2bfloat16_rn(value);
  }
}

template <typename Elem>
struct alignas(sizeof(Elem) * kPerLane) Quad {
  Elem elems[kPerLane];
};

template <typename Elem>
struct RowsSource {
  using Stored = Elem;
  const Elem* x;
  int64_t width;

  __device__ Quad<Elem> load(const RowTile&, int64_t row, int64_t col) const {
    return *reinterpret_cast<const Quad<Elem>*>(x + row * width + col);
  }
};

template <typename Elem>
struct SwigluSource {
  using Stored = Elem;
  const Elem* x;
  int64_t width;

  // As csrc/swiglu.cu: the fast exponential and division do for 2 bytes.
  __device__ static float sigmoid(float gate) {
    if constexpr (sizeof(Elem) == 4) {
      return 1.0f / (1.0f + expf(-gate));
    } else {
      return __fdividef(1.0f, 1.0f + __expf(-gate));
    }
  }

  __device__ Quad<Elem> load(const RowTile&, int64_t row, int64_t col) const {
    const Elem* gates_at = x + row * 2 * width + col;
    const Quad<Elem> gates = *reinterpret_cast<const Quad<Elem>*>(gates_at);
    const Quad<Elem> ups = *reinterpret_cast<const Quad<Elem>*>(gates_at + width);
    Quad<Elem> result;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float gate = widened(gates.elems[i]);
      result.elems[i] = narrowed<Elem>(gate * sigmoid(gate) * widened(ups.elems[i]));
    }
    return result;
  }
};

struct Fp8Source {
  using Stored = __nv_bfloat16;
  const uint8_t* x;
  const float* scales;
  int64_t width;

  __device__ Quad<__nv_bfloat16> load(const RowTile& tile, int64_t row, int64_t col) const {
    const int64_t num_blocks = (width + kTile - 1) / kTile;
    const int64_t at = tile.expert_begin * num_blocks + col / kTile * tile.expert_rows + (row - tile.expert_begin);
    const float scale = scales[at];
    const Quad<uint8_t> codes = *reinterpret_cast<const Quad<uint8_t>*>(x + row * width + col);
    Quad<__nv_bfloat16> result;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      __nv_fp8_e4m3 code;
      code.__x = codes.elems[i];
      result.elems[i] = __float2bfloat16_rn(__fmul_rn(static_cast<float>(code), scale));
    }
    return result;
  }
};

__device__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  }
  return value;
}

template <typename Elem>
__device__ void store_row(uint8_t* at, const Quad<Elem>& values, float inverse) {
  Quad<uint8_t> codes;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    codes.elems[i] = to_e4m3(widened(values.elems[i]), inverse);
  }
  *reinterpret_cast<Quad<uint8_t>*>(at) = codes;
}

template <typename Elem>
struct Shared {
  Quad<Elem> values[kTile][kWarpSize];
  float largest[kWarps][kTile];  // of each column, by warp
  float inverse[kTile];          // of each column's scale; with one scale only the first

  __device__ Elem at(int row, int col) const { return values[row][col / kPerLane].elems[col % kPerLane]; }
};

// The whole tile's scale, known to every thread.
template <typename Elem>
__device__ float tile_scale(Shared<Elem>& shared, float largest, bool power_of_two) {
  largest = warp_max(largest);
  if (threadIdx.x % kWarpSize == 0) {
    shared.largest[threadIdx.x / kWarpSize][0] = largest;
  }
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) {
    largest = fmaxf(largest, shared.largest[warp][0]);
  }
  return block_scale(largest, power_of_two);
}

// Column `col` of the tile from shared memory: a thread takes one column and every second run of rows.
template <typename Elem>
__device__ void store_columns(const Shared<Elem>& shared, const RowTile& tile, int64_t first_col, int64_t width,
                              bool one_scale, uint8_t* columns) {
  const int col = threadIdx.x % kTile;
  if (first_col + col >= width) {
    return;
  }
  const float inverse = shared.inverse[one_scale ? 0 : col];
  uint8_t* to =
      columns + tile.expert_begin * width + (first_col + col) * tile.expert_rows + (tile.begin - tile.expert_begin);
  for (int first = threadIdx.x / kTile * kRun; first < tile.num_rows; first += kThreads / kTile * kRun) {
    alignas(16) uint8_t codes[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      codes[i] = to_e4m3(widened(shared.at(first + i, col)), inverse);
    }
    *reinterpret_cast<uint4*>(to + first) = *reinterpret_cast<const uint4*>(codes);
  }
}

template <typename Source, bool kRows, bool kColumns, bool kOneScale>
__global__ void __launch_bounds__(kThreads) fp8_tile_kernel(Source source, const RowTile* __restrict__ tiles,
                                                            int64_t width, TileOutputs out, bool power_of_two) {
  using Elem = typename Source::Stored;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Shared<Elem>& shared = *reinterpret_cast<Shared<Elem>*>(shared_bytes);
  const int64_t tile_idx = blockIdx.y;
  const RowTile tile = tiles[tile_idx];
  const int64_t block = blockIdx.x;
  const int64_t num_blocks = (width + kTile - 1) / kTile;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t col = block * kTile + lane * kPerLane;
  const bool is_inside = col < width;
  float largest[kPerLane] = {};
  uint8_t* rows = static_cast<uint8_t*>(out.rows);

  // num_rows is a multiple of 16: a warp has all its rows or none.
  const int warp_rows = warp * kRowsPerWarp < tile.num_rows ? kRowsPerWarp : 0;
  for (int first = warp * kRowsPerWarp; first < warp * kRowsPerWarp + warp_rows; first += kBatch) {
    Quad<Elem> batch[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (is_inside) {
        batch[i] = source.load(tile, tile.begin + first + i, col);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Quad<Elem>& values = batch[i];
      if constexpr (kColumns || kOneScale) {
        shared.values[first + i][lane] = values;
      }
      float row_largest = 0.0f;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const float value = widened(values.elems[j]);
        largest[j] = larger_finite(largest[j], value);
        row_largest = larger_finite(row_largest, value);
      }
      if constexpr (kRows && !kOneScale) {
        const int64_t row = tile.begin + first + i;
        const float scale = block_scale(warp_max(row_largest), power_of_two);
        if (is_inside) {
          store_row(rows + row * width + col, values, __frcp_rn(scale));
        }
        if (lane == 0) {
          out.row_scales[tile.expert_begin * num_blocks + block * tile.expert_rows + (row - tile.expert_begin)] = scale;
        }
      }
    }
  }

  if constexpr (kOneScale) {
    float all = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      all = fmaxf(all, largest[j]);
    }
    const float scale = tile_scale(shared, all, power_of_two);
    const float inverse = __frcp_rn(scale);
    if (threadIdx.x == 0) {
      shared.inverse[0] = inverse;
      const int64_t tiles_of_expert = (tile.expert_rows + kTile - 1) / kTile;
      const int64_t in_expert = (tile.begin - tile.expert_begin) / kTile;
      const int64_t expert = tile.expert_begin / tile.expert_rows;
      out.row_scales[tile_idx * ((num_blocks + 3) / 4 * 4) + block] = scale;
      out.column_scales[(expert * num_blocks + block) * ((tiles_of_expert + 3) / 4 * 4) + in_expert] = scale;
    }
    for (int i = 0; i < kRowsPerWarp && is_inside; ++i) {
      const int in_tile = warp * kRowsPerWarp + i;
      if (in_tile < tile.num_rows) {
        store_row(rows + (tile.begin + in_tile) * width + col, shared.values[in_tile][lane], inverse);
      }
    }
  } else if constexpr (kColumns) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      shared.largest[warp][lane * kPerLane + j] = largest[j];
    }
    __syncthreads();
    const int own = threadIdx.x;
    if (own < kTile && block * kTile + own < width) {
      float amax = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        amax = fmaxf(amax, shared.largest[w][own]);
      }
      const float scale = block_scale(amax, power_of_two);
      shared.inverse[own] = __frcp_rn(scale);
      out.column_scales[tile_idx * width + block * kTile + own] = scale;
    }
  }
  if constexpr (kColumns) {
    __syncthreads();
    store_columns(shared, tile, block * kTile, width, kOneScale, static_cast<uint8_t*>(out.columns));
  }
}

__global__ void __launch_bounds__(kThreads)
    fp8_pack_scales_kernel(const float* __restrict__ scales, const RowTile* __restrict__ tiles, int num_blocks,
                           float* __restrict__ packed) {
  const RowTile tile = tiles[blockIdx.x];
  const int64_t base = static_cast<int64_t>(tile.expert_begin) * num_blocks;
  for (int i = threadIdx.x; i < num_blocks * kTile; i += kThreads) {
    const int block = i / kTile, in_tile = i % kTile;
    if (in_tile < tile.num_rows) {
      const int64_t row = tile.begin + in_tile;
      packed[base + static_cast<int64_t>(block) * tile.expert_rows + (row - tile.expert_begin)] =
          scales[row * num_blocks + block];
    }
  }
}

struct Launch {
  const RowTile* tiles;
  int64_t num_tiles;
  int64_t width;
  const TileOutputs& outputs;
  bool power_of_two;
  cudaStream_t stream;

  template <bool kRows, bool kColumns, bool kOneScale, typename Source>
  void run(const Source& source) const {
    const auto kernel = fp8_tile_kernel<Source, kRows, kColumns, kOneScale>;
    constexpr int kBytes = kColumns || kOneScale ? static_cast<int>(sizeof(Shared<typename Source::Stored>)) : 0;
    if constexpr (kBytes > 48 * 1024) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                 "fp8_cast_tiles: the shared memory");
    }
    const dim3 grid(static_cast<unsigned int>((width + kTile - 1) / kTile), static_cast<unsigned int>(num_tiles));
    kernel<<<grid, kThreads, kBytes, stream>>>(source, tiles, width, outputs, power_of_two);
    check_cuda(cudaGetLastError(), "fp8_cast_tiles: the launch");
  }

  template <typename Source>
  void cast_blocks(const Source& source) const {
    if (outputs.columns == nullptr) {
      run<true, false, false>(source);
    } else if (outputs.rows == nullptr) {
      run<false, true, false>(source);
    } else {
      run<true, true, false>(source);
    }
  }

  template <typename Elem>
  void cast(TileSource source, const void* x, bool one_scale) const {
    const Elem* values = static_cast<const Elem*>(x);
    if (source == TileSource::kSwiglu) {
      cast_blocks(SwigluSource<Elem>{values, width});
    } else if (one_scale) {
      run<true, true, true>(RowsSource<Elem>{values, width});
    } else {
      cast_blocks(RowsSource<Elem>{values, width});
    }
  }
};

constexpr int64_t kMaxTiles = 65535;  // what the grid's second dimension holds

}  // namespace

void launch_fp8_cast_tiles(TileSource source, RowType row_type, const void* x, const float* x_scales,
                           const RowTile* tiles, int64_t num_tiles, int64_t width, const TileOutputs& outputs,
                           bool one_scale, bool power_of_two, cudaStream_t stream) {
  MOE_EP_CHECK(num_tiles >= 0 && num_tiles <= kMaxTiles, "fp8_cast_tiles: there are ", num_tiles, " tiles, but 0 to ",
               kMaxTiles, " are possible: cast fewer rows at once.");
  MOE_EP_CHECK(width >= kStep && width % kStep == 0, "fp8_cast_tiles: the width is ", width,
               ", but a multiple of 16 is needed: cast by the formula.");
  MOE_EP_CHECK(row_type != RowType::kFloat16, "fp8_cast_tiles: rows are float16, but bfloat16 and float32 are served.");
  MOE_EP_CHECK(!one_scale || source == TileSource::kRows, "fp8_cast_tiles: one scale a tile is for rows as they are.");
  if (num_tiles == 0) {
    return;
  }
  const Launch launch = {tiles, num_tiles, width, outputs, power_of_two, stream};
  if (source == TileSource::kFp8) {
    return launch.cast_blocks(Fp8Source{static_cast<const uint8_t*>(x), x_scales, width});
  }
  if (row_type == RowType::kFloat32) {
    return launch.cast<float>(source, x, one_scale);
  }
  return launch.cast<__nv_bfloat16>(source, x, one_scale);
}

void launch_fp8_pack_scales(const float* scales, const RowTile* tiles, int64_t num_tiles, int64_t num_blocks,
                            float* packed, cudaStream_t stream) {
  MOE_EP_CHECK(num_tiles >= 0 && num_blocks >= 1 && num_blocks <= (1 << 23), "fp8_pack_scales: ", num_tiles,
               " tiles of ", num_blocks, " blocks, but at least 0 and 1 are needed: give their numbers.");
  if (num_tiles == 0) {
    return;
  }
  fp8_pack_scales_kernel<<<static_cast<unsigned int>(num_tiles), kThreads, 0, stream>>>(
      scales, tiles, static_cast<int>(num_blocks), packed);
  check_cuda(cudaGetLastError(), "fp8_pack_scales: the launch");
}

}  // namespace moe_ep
