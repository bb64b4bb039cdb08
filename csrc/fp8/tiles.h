// Casts to FP8 (e4m3) of rows that are grouped by expert, and of their transpose, in the layout that FP8 GEMMs read:
// the contract is moe_ep/fp8/matrix.py. R rows, K their width, B = ceil(K / 128), E(t) the expert of tile t.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/row_type.h"

namespace moe_ep {

// What the tiles are read from.
enum class TileSource {
  kRows,        // x [R, K] of row_type
  kSwiglu,      // x [R, 2K] of row_type: weight * silu(gate) * up, rounded to row_type
  kSwigluGrad,  // x [R, K] and grads [R, K / 2] of row_type: the gradient of weight * silu(gate) * up to gate and up,
                // rounded to row_type
  kFp8,         // x [R, K] e4m3 with x_scales as launch_fp8_pack_scales writes them: the values rounded to bfloat16
};

struct TileInputs {
  TileSource source;
  RowType row_type;          // bfloat16 or float32 (bfloat16 with kFp8)
  const void* x;             // as the source says
  const float* x_scales;     // for kFp8; null otherwise
  const void* grads;         // for kSwigluGrad; null otherwise
  const float* row_weights;  // [R], for kSwiglu and kSwigluGrad: the weight of each row; null otherwise
};

// Up to 128 rows of one expert. Tiles of an expert are neighbours and ascend; all but its last have 128 rows.
struct RowTile {
  int32_t begin;         // first row
  int32_t num_rows;      // a multiple of 16
  int32_t expert_begin;  // first row of the expert
  int32_t expert_rows;   // rows of the expert
};

struct TileOutputs {
  void* rows;            // [R, K] e4m3, or null
  float* row_scales;     // expert after expert [B, rows of the expert]; one_scale: [tiles, round_up(B, 4)]
  void* columns;         // expert after expert [K, rows of the expert] e4m3, or null
  float* column_scales;  // [tiles, K]; one_scale: expert after expert [B, round_up(tiles of an expert, 4)]
  float* weight_sums;    // kSwigluGrad: [R, ceil(K / 2 / 128)], or null: of each 128 columns of grads, the sum of
                         // grad * silu(gate) * up, so that a row's sums add up to the gradient of its weight
};

// One pass over the tiles; the arithmetic of a block is that of moe_ep/fp8/cast.py, bit for bit. A block is 1x128 in
// `rows`, 128x1 (the rows of a tile) in `columns`, and with one_scale the tile of 128x128 in both. At least one of the
// two is asked for. The sums of the weights are in float32, in an order that K alone decides.
//
//   tiles      in   [num_tiles] in device memory
//   width      K, a multiple of 16, and its half with kSwigluGrad
//   one_scale  all experts have the same number of rows
//   stream     a cudaStream_t of the device that is current and owns every pointer
//
// Ownership: the caller allocates and keeps everything alive until the work on `stream` is done. Pointers are aligned
// to 16 bytes, weights and their sums to 4. With one_scale the padding of the scales is not written. num_tiles = 0
// launches nothing. Does not wait for the device. Throws std::runtime_error for an impossible argument, or where the
// launch fails.
void launch_fp8_cast_tiles(const TileInputs& inputs, const RowTile* tiles, int64_t num_tiles, int64_t width,
                           const TileOutputs& outputs, bool one_scale, bool power_of_two, cudaStream_t stream);

// Scales as they travel, [R, B], to expert after expert [B, rows of the expert]. The rest as above.
void launch_fp8_pack_scales(const float* scales, const RowTile* tiles, int64_t num_tiles, int64_t num_blocks,
                            float* packed, cudaStream_t stream);

}  // namespace moe_ep
