#include <cuda_bf16.h>

#include <cstdint>

#include "common/check.h"
#include "fp8/math.cuh"
#include "fp8/sources.cuh"
#include "fp8/tiles.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRowsPerWarp = kTile / kWarps;
constexpr int kRun = 16;   // rows of a transposed store: 16 bytes
constexpr int kStep = 16;  // what widths and numbers of rows are multiples of

__device__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  }
  return value;
}

// The largest, or the sum, of each of a warp's rows: of row lane / 2. Each step halves the rows of a lane, so that 16
// rows take 16 shuffles.
template <int kRows, typename Join>
__device__ float joined_rows(const float (&of_lane)[kRows], Join join) {
  constexpr int kHalf = kRows / 2;
  const bool is_upper = threadIdx.x & kRows;
  float halved[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = is_upper ? of_lane[i + kHalf] : of_lane[i];
    const float sent = is_upper ? of_lane[i] : of_lane[i + kHalf];
    halved[i] = join(kept, __shfl_xor_sync(0xFFFFFFFFu, sent, kRows));
  }
  if constexpr (kHalf == 1) {
    return join(halved[0], __shfl_xor_sync(0xFFFFFFFFu, halved[0], 1));
  } else {
    return joined_rows(halved, join);
  }
}

template <typename Elem>
__device__ uint32_t row_codes(const Quad<Elem>& values, float inverse) {
  const float4 wide = widened(values);
  return to_e4m3x2(wide.x, wide.y, inverse) | to_e4m3x2(wide.z, wide.w, inverse) << 16;
}

// To the compiler the values may have changed. It would keep what widened() gave it the first time, in twice the
// registers.
template <typename Elem>
__device__ void forget_widened(Quad<Elem> (&values)[kRowsPerWarp]) {
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(&values[i]);
#pragma unroll
    for (size_t word = 0; word < sizeof(Quad<Elem>) / sizeof(uint32_t); ++word) {
      asm volatile("" : "+r"(words[word]));
    }
  }
}

// A thread keeps 16 rows of 4 columns in registers. Through here go only what the warps tell each other of their
// columns, and the columns' codes, so that a column of the tile is written as one line of 128 bytes.
struct Shared {
  float largest[kWarps][kTile];  // of each column, by warp; with one scale [warp][0] of all
  float inverse[kTile];          // of each column's scale
  uint4 codes[kTile][kTile / kRun];

  // Where 16 rows of a column lie: shuffled, so that neither the threads that write nor those that read meet in a bank.
  __device__ uint4& run(int col, int run) { return codes[col][run ^ (col / kPerLane % (kTile / kRun))]; }
};

// The whole tile's scale, known to every thread.
__device__ float tile_scale(Shared& shared, const float (&largest)[kPerLane], bool power_of_two) {
  float all = 0.0f;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    all = fmaxf(all, largest[j]);
  }
  all = warp_max(all);
  if (threadIdx.x % kWarpSize == 0) {
    shared.largest[threadIdx.x / kWarpSize][0] = all;
  }
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) {
    all = fmaxf(all, shared.largest[warp][0]);
  }
  return block_scale(all, power_of_two);
}

// The scale of every column of the tile goes to `scales`, which may be past the end of a row, its inverse to shared
// memory.
__device__ void find_column_scales(Shared& shared, const float (&largest)[kPerLane], float* scales, int num_cols,
                                   bool power_of_two) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, col = threadIdx.x;
  *reinterpret_cast<float4*>(&shared.largest[warp][lane * kPerLane]) =
      make_float4(largest[0], largest[1], largest[2], largest[3]);
  __syncthreads();
  if (col < kTile) {
    float amax = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      amax = fmaxf(amax, shared.largest[w][col]);
    }
    const float scale = block_scale(amax, power_of_two);
    shared.inverse[col] = __frcp_rn(scale);
    if (col < num_cols) {
      scales[col] = scale;
    }
  }
  __syncthreads();
}

// Casts a thread's columns and writes the tile's. `columns` is the tile's first column, at the tile's first row.
template <typename Elem>
__device__ void store_columns(Shared& shared, const Quad<Elem> (&values)[kRowsPerWarp],
                              const float (&inverse)[kPerLane], uint8_t* columns, int64_t stride, int num_cols,
                              int num_rows) {
  static_assert(kRun == kRowsPerWarp && sizeof(uint4) == kRun);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  uint32_t words[kPerLane][kRun / 4];
#pragma unroll
  for (int word = 0; word < kRun / 4; ++word) {
    const float4 rows[4] = {widened(values[4 * word]), widened(values[4 * word + 1]), widened(values[4 * word + 2]),
                            widened(values[4 * word + 3])};
    const auto codes = [](float a, float b, float c, float d, float of_column) {
      return to_e4m3x2(a, b, of_column) | to_e4m3x2(c, d, of_column) << 16;
    };
    words[0][word] = codes(rows[0].x, rows[1].x, rows[2].x, rows[3].x, inverse[0]);
    words[1][word] = codes(rows[0].y, rows[1].y, rows[2].y, rows[3].y, inverse[1]);
    words[2][word] = codes(rows[0].z, rows[1].z, rows[2].z, rows[3].z, inverse[2]);
    words[3][word] = codes(rows[0].w, rows[1].w, rows[2].w, rows[3].w, inverse[3]);
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    shared.run(lane * kPerLane + j, warp) = make_uint4(words[j][0], words[j][1], words[j][2], words[j][3]);
  }
  __syncthreads();
  constexpr int kRuns = kTile / kRun;
  for (int i = threadIdx.x; i < num_cols * kRuns; i += kThreads) {
    const int col = i / kRuns, run = i % kRuns;
    if (run * kRun < num_rows) {
      *reinterpret_cast<uint4*>(columns + col * stride + run * kRun) = shared.run(col, run);
    }
  }
}

// A warp has 16 rows of the tile, a lane 4 of their columns. With one scale an SM takes a block less before it spills.
template <typename Source, bool kRows, bool kColumns, bool kOneScale>
__global__ void __launch_bounds__(kThreads, kOneScale ? (Source::kBlocksPerSm + 2) / 2 : Source::kBlocksPerSm)
    fp8_tile_kernel(Source source, const RowTile* __restrict__ tiles, int64_t width, TileOutputs out,
                    bool power_of_two) {
  using Elem = typename Source::Stored;
  __shared__ Shared shared;
  const int64_t tile_idx = blockIdx.y, block = blockIdx.x;
  const RowTile tile = tiles[tile_idx];
  const int64_t num_blocks = (width + kTile - 1) / kTile;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t first_col = block * kTile, col = first_col + lane * kPerLane;
  const int num_cols = static_cast<int>(min(static_cast<int64_t>(kTile), width - first_col));
  const int64_t first_row = tile.begin + warp * kRowsPerWarp;
  // num_rows is a multiple of 16: a warp has all its rows or none.
  const bool has_rows = warp * kRowsPerWarp < tile.num_rows;
  const bool is_inside = has_rows && col < width;

  Quad<Elem> values[kRowsPerWarp] = {};
  float sums[kRowsPerWarp] = {};
  if (is_inside) {
    if constexpr (Source::kSums) {
      source.load_rows(first_row, col, values, sums);
    } else {
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        values[i] = source.load(tile, first_row + i, col);
      }
    }
  }
  if constexpr (Source::kSums) {
    if (out.weight_sums != nullptr && 2 * first_col < width) {
      const float sum = joined_rows(sums, [](float a, float b) { return a + b; });
      if (has_rows && lane % 2 == 0) {
        out.weight_sums[(first_row + lane / 2) * ((width / 2 + kTile - 1) / kTile) + block] = sum;
      }
    }
  }
  float of_rows[kRowsPerWarp] = {};
  float of_columns[kPerLane] = {};
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    values[i] = without_infinities(values[i]);
    const float4 wide = widened(values[i]);
    of_columns[0] = fmaxf(of_columns[0], fabsf(wide.x));
    of_columns[1] = fmaxf(of_columns[1], fabsf(wide.y));
    of_columns[2] = fmaxf(of_columns[2], fabsf(wide.z));
    of_columns[3] = fmaxf(of_columns[3], fabsf(wide.w));
    of_rows[i] = fmaxf(fmaxf(fmaxf(fmaxf(0.0f, fabsf(wide.x)), fabsf(wide.y)), fabsf(wide.z)), fabsf(wide.w));
  }

  forget_widened(values);

  uint8_t* rows = static_cast<uint8_t*>(out.rows) + first_row * width + col;
  if constexpr (kRows && !kOneScale) {
    const float largest = joined_rows(of_rows, [](float a, float b) { return fmaxf(a, b); });
    const float scale = block_scale(largest, power_of_two);
    const float inverse = __frcp_rn(scale);
    if (has_rows && lane % 2 == 0) {
      const int64_t in_expert = first_row - tile.expert_begin + lane / 2;
      out.row_scales[tile.expert_begin * num_blocks + block * tile.expert_rows + in_expert] = scale;
    }
    uint32_t codes[kRowsPerWarp];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      codes[i] = row_codes(values[i], __shfl_sync(0xFFFFFFFFu, inverse, 2 * i));
    }
    if (is_inside) {
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i, rows += width) {
        *reinterpret_cast<uint32_t*>(rows) = codes[i];
      }
    }
  }
  forget_widened(values);

  float inverse[kPerLane] = {};
  if constexpr (kOneScale) {
    const float scale = tile_scale(shared, of_columns, power_of_two);
    inverse[0] = inverse[1] = inverse[2] = inverse[3] = __frcp_rn(scale);
    if (threadIdx.x == 0) {
      const int64_t tiles_of_expert = (tile.expert_rows + kTile - 1) / kTile;
      const int64_t in_expert = (tile.begin - tile.expert_begin) / kTile;
      const int64_t expert = tile.expert_begin / tile.expert_rows;
      out.row_scales[tile_idx * ((num_blocks + 3) / 4 * 4) + block] = scale;
      if constexpr (kColumns) {
        out.column_scales[(expert * num_blocks + block) * ((tiles_of_expert + 3) / 4 * 4) + in_expert] = scale;
      }
    }
    if (is_inside) {
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i, rows += width) {
        *reinterpret_cast<uint32_t*>(rows) = row_codes(values[i], inverse[0]);
      }
    }
  } else if constexpr (kColumns) {
    find_column_scales(shared, of_columns, out.column_scales + tile_idx * width + first_col, num_cols, power_of_two);
    const float4 read = *reinterpret_cast<const float4*>(&shared.inverse[lane * kPerLane]);
    inverse[0] = read.x, inverse[1] = read.y, inverse[2] = read.z, inverse[3] = read.w;
  }
  if constexpr (kColumns) {
    uint8_t* const columns = static_cast<uint8_t*>(out.columns) + tile.expert_begin * width +
                             first_col * tile.expert_rows + (tile.begin - tile.expert_begin);
    store_columns(shared, values, inverse, columns, tile.expert_rows, num_cols, tile.num_rows);
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
    const dim3 grid(static_cast<unsigned int>((width + kTile - 1) / kTile), static_cast<unsigned int>(num_tiles));
    kernel<<<grid, kThreads, 0, stream>>>(source, tiles, width, outputs, power_of_two);
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
  void cast(const TileInputs& in, bool one_scale) const {
    const Elem* values = static_cast<const Elem*>(in.x);
    if (in.source == TileSource::kSwiglu) {
      cast_blocks(SwigluSource<Elem>{values, in.row_weights, width});
    } else if (in.source == TileSource::kSwigluGrad) {
      cast_blocks(SwigluGradSource<Elem>{values, static_cast<const Elem*>(in.grads), in.row_weights, width});
    } else if (one_scale && outputs.columns == nullptr) {
      run<true, false, true>(RowsSource<Elem>{values, width});
    } else if (one_scale) {
      run<true, true, true>(RowsSource<Elem>{values, width});
    } else {
      cast_blocks(RowsSource<Elem>{values, width});
    }
  }
};

constexpr int64_t kMaxTiles = 65535;  // what the grid's second dimension holds

}  // namespace

void launch_fp8_cast_tiles(const TileInputs& inputs, const RowTile* tiles, int64_t num_tiles, int64_t width,
                           const TileOutputs& outputs, bool one_scale, bool power_of_two, cudaStream_t stream) {
  const TileSource source = inputs.source;
  MOE_EP_CHECK(num_tiles >= 0 && num_tiles <= kMaxTiles, "fp8_cast_tiles: there are ", num_tiles, " tiles, but 0 to ",
               kMaxTiles, " are possible: cast fewer rows at once.");
  MOE_EP_CHECK(width >= kStep && width % kStep == 0, "fp8_cast_tiles: the width is ", width,
               ", but a multiple of 16 is needed: cast by the formula.");
  MOE_EP_CHECK(source != TileSource::kSwigluGrad || width % (2 * kStep) == 0, "fp8_cast_tiles: the width is ", width,
               ", but halves that are multiples of 16 are needed for SwiGLU's gradient: cast it after computing it.");
  MOE_EP_CHECK(inputs.row_type != RowType::kFloat16,
               "fp8_cast_tiles: rows are float16, but bfloat16 and float32 are served.");
  MOE_EP_CHECK(!one_scale || source == TileSource::kRows, "fp8_cast_tiles: one scale a tile is for rows as they are.");
  MOE_EP_CHECK(outputs.weight_sums == nullptr || source == TileSource::kSwigluGrad,
               "fp8_cast_tiles: sums for the weights come with SwiGLU's gradient: give no weight_sums.");
  if (num_tiles == 0) {
    return;
  }
  const Launch launch = {tiles, num_tiles, width, outputs, power_of_two, stream};
  if (source == TileSource::kFp8) {
    return launch.cast_blocks(Fp8Source{static_cast<const uint8_t*>(inputs.x), inputs.x_scales, width});
  }
  if (inputs.row_type == RowType::kFloat32) {
    return launch.cast<float>(inputs, one_scale);
  }
  return launch.cast<__nv_bfloat16>(inputs, one_scale);
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
