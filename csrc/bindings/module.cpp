// The Python module moe_ep._C. Pointers and streams arrive as integers: no tensor type crosses this border, so one
// build serves every PyTorch version. Arguments are by keyword only, since most are integers and would swap silently;
// the launches of an exchange are the exception. The contracts are in the headers of the launch functions; the Python
// signatures are in moe_ep/_native/loader.py.
#include <pybind11/pybind11.h>

#include <string>

#include "bindings/binding.h"
#include "fp8/cast.h"
#include "layer/layout_count.h"

#define MOE_EP_STRING_(text) #text
#define MOE_EP_STRING(text) MOE_EP_STRING_(text)

namespace py = pybind11;

namespace {

using moe_ep::pointer_from;
using moe_ep::stream_from;

void fp8_cast_1x128(uintptr_t x, const std::string& dtype, uintptr_t q, uintptr_t scales, int64_t num_tokens,
                    int64_t hidden, bool power_of_two, int num_sms, uintptr_t stream) {
  moe_ep::launch_fp8_cast_1x128(pointer_from<const void>(x), moe_ep::row_type_from(dtype), pointer_from<void>(q),
                                pointer_from<float>(scales), num_tokens, hidden, power_of_two, num_sms,
                                stream_from(stream));
}

void layout_count(uintptr_t topk_idx, int idx_bytes, uintptr_t rank_of_expert, uintptr_t tokens_per_expert,
                  uintptr_t tokens_per_rank, uintptr_t is_token_in_rank, uintptr_t bad_id, int64_t num_tokens,
                  int64_t num_topk, int64_t num_experts, int64_t num_ranks, int num_sms, uintptr_t stream) {
  moe_ep::launch_layout_count(pointer_from<const void>(topk_idx), idx_bytes,
                              pointer_from<const int32_t>(rank_of_expert), pointer_from<int32_t>(tokens_per_expert),
                              pointer_from<int32_t>(tokens_per_rank), pointer_from<uint8_t>(is_token_in_rank),
                              pointer_from<int64_t>(bad_id), num_tokens, num_topk, num_experts, num_ranks, num_sms,
                              stream_from(stream));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CUDA kernels of moe_ep; call them through moe_ep._native.";
  module.attr("cuda_archs") = MOE_EP_STRING(MOE_EP_CUDA_ARCHS);

  moe_ep::bind_layer_kernels(module);
  moe_ep::bind_fp8_kernels(module);
  moe_ep::bind_intranode(module);
  moe_ep::bind_low_latency(module);
  moe_ep::bind_rails(module);

  const moe_ep::NoGil no_gil;
  module.def("fp8_cast_1x128", &fp8_cast_1x128, no_gil, py::kw_only(), py::arg("x"), py::arg("dtype"), py::arg("q"),
             py::arg("scales"), py::arg("num_tokens"), py::arg("hidden"), py::arg("power_of_two"), py::arg("num_sms"),
             py::arg("stream"));
  module.def("layout_count", &layout_count, no_gil, py::kw_only(), py::arg("topk_idx"), py::arg("idx_bytes"),
             py::arg("rank_of_expert"), py::arg("tokens_per_expert"), py::arg("tokens_per_rank"),
             py::arg("is_token_in_rank"), py::arg("bad_id"), py::arg("num_tokens"), py::arg("num_topk"),
             py::arg("num_experts"), py::arg("num_ranks"), py::arg("num_sms"), py::arg("stream"));
}
