#include "low_latency/combine.cuh"

namespace moe_ep {

template void launch_low_latency_combine<StoreHop>(const LowLatencyCall&, const LowLatencyCombine&, RowKind, int,
                                                   cudaStream_t);
template void launch_low_latency_refusal<StoreHop>(const LowLatencyCall&, cudaStream_t);
template void launch_low_latency_drain<StoreHop>(const LowLatencyCall&, cudaStream_t);
template void load_low_latency_combine<StoreHop>();

}  // namespace moe_ep
