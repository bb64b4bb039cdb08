// Names of row types, as Python gives them.
#pragma once

#include <string>

#include "common/check.h"
#include "common/row_kind.h"

namespace moe_ep {

inline RowKind row_kind(const std::string& name) {
  if (name == "bfloat16") {
    return RowKind::kBFloat16;
  }
  if (name == "float16") {
    return RowKind::kFloat16;
  }
  if (name == "float32") {
    return RowKind::kFloat32;
  }
  MOE_EP_CHECK(name == "float64", "rows have dtype ", name, ", which cannot be summed here: convert them.");
  return RowKind::kFloat64;
}

}  // namespace moe_ep
