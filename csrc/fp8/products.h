// Products of FP8 matrices by cuBLASLt, one a pair, several pairs at once: out = b @ a.T for each pair.
//
// cuBLASLt is loaded at run time (it is the one that PyTorch has loaded), so that nothing links against it. Where its
// header was not there at build time, or is older than block scales (12.9), every call here throws.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/row_type.h"

namespace moe_ep {

// What one scale is for: moe_ep/fp8/matrix.py has the layouts.
enum class Fp8Scaling { kRows, kTiles, kTensor };

struct Fp8Operand {
  Fp8Scaling scaling;
  bool is_e5m2;
};

// a [m, k] and b [n, k] FP8, row-major, out [n, m]. All multiples of 16, pointers aligned to 16 bytes.
struct Fp8Product {
  int64_t m, n, k;
  const void* a;
  const void* a_scales;
  const void* b;
  const void* b_scales;
  void* out;
};

// Why this build or this machine cannot multiply, as the middle of a sentence; empty if it can.
std::string fp8_products_obstacle();

// What the products of one device share: a handle, the streams that they spread over, the algorithm of every shape that
// came so far. Thread-safe.
class Fp8Products {
 public:
  static constexpr int kStreams = 4;

  // On the current device, with one workspace a stream, which the caller keeps alive as long as this.
  Fp8Products(const std::vector<void*>& workspaces, size_t workspace_bytes);
  ~Fp8Products();

  // Behind what `stream` holds; `stream` goes on behind all of them. Does not wait for the device.
  void multiply(const std::vector<Fp8Product>& products, Fp8Operand a, Fp8Operand b, RowType type, cudaStream_t stream);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moe_ep
