// SwiGLU between the two projections of an expert. R rows, F ffn width.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/row_type.h"

namespace moe_ep {

// out = silu(gate) * up, with silu(x) = x / (1 + exp(-x)). Arithmetic in float32, rounded once to the row type.
//
//   projected  in   [R, 2F] of row_type, contiguous: a row's F gates, then its F ups
//   out        out  [R, F] of row_type, contiguous
//   num_rows_device  in  one int32 in device memory: rows from that number on are not read and their results are 0;
//                    null = every row counts
//   num_sms    at most this many SMs are used; 0 = the whole device
//   stream     a cudaStream_t of the device that is current and owns every pointer
//
// Accesses are 16 bytes wide where F and all addresses allow it, else one element wide; the bits do not depend on it.
//
// Ownership: the caller allocates and keeps everything alive until the work on `stream` is done. Outputs are written
// whole. R = 0 launches nothing. Offsets are 64 bit: R * 2F may pass 2^31. Does not wait for the device.
// Throws std::runtime_error where R < 0, F < 1, num_sms < 0, or where the launch fails.
void launch_swiglu(const void* projected, RowType row_type, void* out, const int32_t* num_rows_device, int64_t num_rows,
                   int64_t ffn, int num_sms, cudaStream_t stream);

// The same, times a weight of each row: out = weight * silu(gate) * up, rounded once.
//
//   row_weights  in  [R] float32, contiguous
void launch_weighted_swiglu(const void* projected, const float* row_weights, RowType row_type, void* out,
                            const int32_t* num_rows_device, int64_t num_rows, int64_t ffn, int num_sms,
                            cudaStream_t stream);

// The gradient of launch_swiglu: with s = sigmoid(gate), d_gate = d_out * up * s * (1 + gate * (1 - s)) and
// d_up = d_out * gate * s.
//
//   projected       in   [R, 2F] of row_type, as in the forward
//   grad_out        in   [R, F] of row_type, contiguous
//   grad_projected  out  [R, 2F] of row_type, contiguous
//
// The rest as above.
void launch_swiglu_backward(const void* projected, const void* grad_out, RowType row_type, void* grad_projected,
                            const int32_t* num_rows_device, int64_t num_rows, int64_t ffn, int num_sms,
                            cudaStream_t stream);

// The gradient of launch_weighted_swiglu: that of launch_swiglu times the weight, and
// d_weight = sum over F of d_out * silu(gate) * up, in float32, added up in an order that F alone decides.
//
//   grad_weights  out  [R] float32, contiguous
void launch_weighted_swiglu_backward(const void* projected, const float* row_weights, const void* grad_out,
                                     RowType row_type, void* grad_projected, float* grad_weights,
                                     const int32_t* num_rows_device, int64_t num_rows, int64_t ffn, int num_sms,
                                     cudaStream_t stream);

// Sets the rows from *num_rows_device on to zero and leaves those before them alone.
//
//   rows       inout  [R, row_bytes] bytes, contiguous
//   the rest   as above; row_bytes >= 1
void launch_zero_tail(void* rows, const int32_t* num_rows_device, int64_t num_rows, int64_t row_bytes, int num_sms,
                      cudaStream_t stream);

}  // namespace moe_ep
