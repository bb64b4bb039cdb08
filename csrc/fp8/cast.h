// Cast of rows to FP8 (e4m3) with one float32 scale per 1x128 block. T tokens, H hidden, B = ceil(H / 128) blocks a
// row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/row_type.h"

namespace moe_ep {

// Writes x / scale as e4m3 and the scale of each block. The arithmetic is that of moe_ep/fp8/cast.py, bit for bit.
//
//   x       in   [T, H] of row_type, contiguous, aligned to its element; device memory
//   q       out  [T, H] e4m3 (one byte), contiguous
//   scales  out  [T, B] float32, contiguous; x is about q * scale; every scale is finite and at least 2^-126
//   power_of_two  scales are rounded up to a power of two
//   num_sms  at most this many SMs are used (>= 1)
//   stream   a cudaStream_t of the device that is current and owns all three pointers
//
// Ownership: the caller allocates and keeps everything alive until the work on `stream` is done. All of q and scales is
// written. T = 0 launches nothing. Offsets are 64 bit: T * H may pass 2^31. Does not wait for the device.
// Throws std::runtime_error where T < 0, H < 1, num_sms < 1, or where the launch fails.
void launch_fp8_cast_1x128(const void* x, RowType row_type, void* q, float* scales, int64_t num_tokens, int64_t hidden,
                           bool power_of_two, int num_sms, cudaStream_t stream);

}  // namespace moe_ep
