// The dtypes of rows that casts and the layer's kernels take, and that FP8 products give.
#pragma once

namespace moe_ep {

enum class RowType { kBFloat16, kFloat16, kFloat32 };

}  // namespace moe_ep
