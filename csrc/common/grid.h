// How a launch keeps its SM budget.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe_ep {

// Every kernel here loops over its work with whatever grid it gets. A grid of at most num_sms blocks occupies at most
// num_sms SMs, however the hardware places the blocks; the result never depends on it.
inline unsigned int grid_size(int64_t num_items, int64_t items_per_block, int num_sms) {
  const int64_t needed = (num_items + items_per_block - 1) / items_per_block;
  return static_cast<unsigned int>(std::min<int64_t>(needed, num_sms));
}

}  // namespace moe_ep
