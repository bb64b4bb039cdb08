// The arithmetic of one FP8 block, as moe_ep/fp8/cast.py writes it down: bit for bit the same in every cast.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

namespace moe_ep {

constexpr float kMaxE4M3 = 448.0f;
constexpr uint8_t kNanE4M3 = 0x7F;

// NaN and infinity say nothing about the block's size: they are left out here and become NaN below, so that one bad
// element neither spoils its neighbours nor makes the scale infinite.
__device__ inline float larger_finite(float amax, float value) {
  const float magnitude = fabsf(value);
  return magnitude <= FLT_MAX ? fmaxf(amax, magnitude) : amax;
}

// The floor is the smallest normal number: a block of zeros or of tiny values keeps a positive scale whose reciprocal
// (2^126) is finite too, so neither 0/0 nor 1/0 can arise here or in a consumer.
__device__ inline float block_scale(float amax, bool power_of_two) {
  const float scale = fmaxf(__fdiv_rn(amax, kMaxE4M3), FLT_MIN);
  // Adding all mantissa bits carries into the exponent unless the mantissa is zero already.
  return power_of_two ? __uint_as_float((__float_as_uint(scale) + 0x007FFFFFu) & 0x7F800000u) : scale;
}

__device__ inline uint8_t to_e4m3(float value, float inverse_scale) {
  if (!(fabsf(value) <= FLT_MAX)) {
    return kNanE4M3;
  }
  return __nv_cvt_float_to_fp8(__fmul_rn(value, inverse_scale), __NV_SATFINITE, __NV_E4M3);
}

// Two at once in one conversion, of numbers or NaN (whose code is kNanE4M3) but not of infinities; `first` is the low
// byte.
__device__ inline uint32_t to_e4m3x2(float first, float second, float inverse_scale) {
  const float2 scaled = {__fmul_rn(first, inverse_scale), __fmul_rn(second, inverse_scale)};
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
}

}  // namespace moe_ep
