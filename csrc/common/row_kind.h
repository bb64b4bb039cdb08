// The dtypes of rows that can be added up.
#pragma once

namespace moe_ep {

enum class RowKind { kBFloat16, kFloat16, kFloat32, kFloat64 };

}  // namespace moe_ep
