#include "low_latency/dispatch.cuh"

namespace moe_ep {

template void launch_low_latency_dispatch<StoreHop>(const LowLatencyCall&, const LowLatencyDispatch&, int,
                                                    cudaStream_t);
template void load_low_latency_dispatch<StoreHop>();

}  // namespace moe_ep
