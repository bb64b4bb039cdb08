// The part of moe_ep._C that moe_ep.layers calls; the Python signatures are in moe_ep/_native/layer.py.
#include <pybind11/pybind11.h>

#include <string>

#include "bindings/binding.h"
#include "common/check.h"
#include "layer/slots_of_map.h"
#include "layer/swiglu.h"
#include "layer/topk.h"

namespace py = pybind11;

namespace moe_ep {
namespace {

ScoreFunction score_function_from(const std::string& name) {
  if (name == "softmax") {
    return ScoreFunction::kSoftmax;
  }
  if (name == "softmax_of_chosen") {
    return ScoreFunction::kSoftmaxOfChosen;
  }
  MOE_EP_CHECK(name == "sigmoid", "score_function is ", name,
               ", but softmax, softmax_of_chosen and sigmoid are supported: name one of them.");
  return ScoreFunction::kSigmoid;
}

void topk_route(uintptr_t logits, uintptr_t expert_bias, uintptr_t padding_mask, uintptr_t topk_idx,
                uintptr_t topk_weights, uintptr_t probs, uintptr_t counts, int64_t num_tokens, int num_experts,
                const std::string& score_function, int num_topk, int num_groups, int group_topk, int num_best,
                bool normalize, float scaling_factor, int num_sms, uintptr_t stream) {
  const RouteOptions options = {
      score_function_from(score_function), num_topk, num_groups, group_topk, num_best, normalize, scaling_factor};
  launch_topk_route(pointer_from<const float>(logits), pointer_from<const float>(expert_bias),
                    pointer_from<const uint8_t>(padding_mask), pointer_from<int64_t>(topk_idx),
                    pointer_from<float>(topk_weights), pointer_from<float>(probs), pointer_from<int64_t>(counts),
                    num_tokens, num_experts, options, num_sms, stream_from(stream));
}

void topk_route_backward(uintptr_t logits, uintptr_t topk_idx, uintptr_t grad_weights, uintptr_t grad_probs,
                         int64_t probs_stride, uintptr_t grad_logits, int64_t num_tokens, int num_experts,
                         const std::string& score_function, int num_topk, bool normalize, float scaling_factor,
                         int num_sms, uintptr_t stream) {
  const RouteOptions options = {score_function_from(score_function), num_topk, 0, 0, 0, normalize, scaling_factor};
  launch_topk_route_backward(pointer_from<const float>(logits), pointer_from<const int64_t>(topk_idx),
                             pointer_from<const float>(grad_weights), pointer_from<const float>(grad_probs),
                             probs_stride, pointer_from<float>(grad_logits), num_tokens, num_experts, options, num_sms,
                             stream_from(stream));
}

void slots_of_map(uintptr_t map, uintptr_t probs, uintptr_t idx, uintptr_t weights, int64_t num_tokens, int num_experts,
                  int num_slots, int num_sms, uintptr_t stream) {
  launch_slots_of_map(pointer_from<const uint8_t>(map), pointer_from<const float>(probs), pointer_from<int64_t>(idx),
                      pointer_from<float>(weights), num_tokens, num_experts, num_slots, num_sms, stream_from(stream));
}

void slots_of_map_backward(uintptr_t idx, uintptr_t grad_weights, uintptr_t grad_probs, int64_t num_tokens,
                           int num_experts, int num_slots, int num_sms, uintptr_t stream) {
  launch_slots_of_map_backward(pointer_from<const int64_t>(idx), pointer_from<const float>(grad_weights),
                               pointer_from<float>(grad_probs), num_tokens, num_experts, num_slots, num_sms,
                               stream_from(stream));
}

void swiglu(uintptr_t projected, const std::string& dtype, uintptr_t out, uintptr_t num_rows_device, int64_t num_rows,
            int64_t ffn, int num_sms, uintptr_t stream) {
  launch_swiglu(pointer_from<const void>(projected), row_type_from(dtype), pointer_from<void>(out),
                pointer_from<const int32_t>(num_rows_device), num_rows, ffn, num_sms, stream_from(stream));
}

void swiglu_backward(uintptr_t projected, uintptr_t grad_out, const std::string& dtype, uintptr_t grad_projected,
                     uintptr_t num_rows_device, int64_t num_rows, int64_t ffn, int num_sms, uintptr_t stream) {
  launch_swiglu_backward(pointer_from<const void>(projected), pointer_from<const void>(grad_out), row_type_from(dtype),
                         pointer_from<void>(grad_projected), pointer_from<const int32_t>(num_rows_device), num_rows,
                         ffn, num_sms, stream_from(stream));
}

void weighted_swiglu(uintptr_t projected, uintptr_t row_weights, const std::string& dtype, uintptr_t out,
                     uintptr_t num_rows_device, int64_t num_rows, int64_t ffn, int num_sms, uintptr_t stream) {
  launch_weighted_swiglu(pointer_from<const void>(projected), pointer_from<const float>(row_weights),
                         row_type_from(dtype), pointer_from<void>(out), pointer_from<const int32_t>(num_rows_device),
                         num_rows, ffn, num_sms, stream_from(stream));
}

void weighted_swiglu_backward(uintptr_t projected, uintptr_t row_weights, uintptr_t grad_out, const std::string& dtype,
                              uintptr_t grad_projected, uintptr_t grad_weights, uintptr_t num_rows_device,
                              int64_t num_rows, int64_t ffn, int num_sms, uintptr_t stream) {
  launch_weighted_swiglu_backward(
      pointer_from<const void>(projected), pointer_from<const float>(row_weights), pointer_from<const void>(grad_out),
      row_type_from(dtype), pointer_from<void>(grad_projected), pointer_from<float>(grad_weights),
      pointer_from<const int32_t>(num_rows_device), num_rows, ffn, num_sms, stream_from(stream));
}

void zero_tail(uintptr_t rows, uintptr_t num_rows_device, int64_t num_rows, int64_t row_bytes, int num_sms,
               uintptr_t stream) {
  launch_zero_tail(pointer_from<void>(rows), pointer_from<const int32_t>(num_rows_device), num_rows, row_bytes, num_sms,
                   stream_from(stream));
}

}  // namespace

void bind_layer_kernels(py::module_& module) {
  const NoGil no_gil;
  module.def("topk_route", &topk_route, no_gil, py::kw_only(), py::arg("logits"), py::arg("expert_bias"),
             py::arg("padding_mask"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("probs"), py::arg("counts"),
             py::arg("num_tokens"), py::arg("num_experts"), py::arg("score_function"), py::arg("num_topk"),
             py::arg("num_groups"), py::arg("group_topk"), py::arg("num_best"), py::arg("normalize"),
             py::arg("scaling_factor"), py::arg("num_sms"), py::arg("stream"));
  module.def("topk_route_backward", &topk_route_backward, no_gil, py::kw_only(), py::arg("logits"), py::arg("topk_idx"),
             py::arg("grad_weights"), py::arg("grad_probs"), py::arg("probs_stride"), py::arg("grad_logits"),
             py::arg("num_tokens"), py::arg("num_experts"), py::arg("score_function"), py::arg("num_topk"),
             py::arg("normalize"), py::arg("scaling_factor"), py::arg("num_sms"), py::arg("stream"));
  module.def("slots_of_map", &slots_of_map, no_gil, py::kw_only(), py::arg("map"), py::arg("probs"), py::arg("idx"),
             py::arg("weights"), py::arg("num_tokens"), py::arg("num_experts"), py::arg("num_slots"),
             py::arg("num_sms"), py::arg("stream"));
  module.def("slots_of_map_backward", &slots_of_map_backward, no_gil, py::kw_only(), py::arg("idx"),
             py::arg("grad_weights"), py::arg("grad_probs"), py::arg("num_tokens"), py::arg("num_experts"),
             py::arg("num_slots"), py::arg("num_sms"), py::arg("stream"));
  module.def("swiglu", &swiglu, no_gil, py::kw_only(), py::arg("projected"), py::arg("dtype"), py::arg("out"),
             py::arg("num_rows_device"), py::arg("num_rows"), py::arg("ffn"), py::arg("num_sms"), py::arg("stream"));
  module.def("swiglu_backward", &swiglu_backward, no_gil, py::kw_only(), py::arg("projected"), py::arg("grad_out"),
             py::arg("dtype"), py::arg("grad_projected"), py::arg("num_rows_device"), py::arg("num_rows"),
             py::arg("ffn"), py::arg("num_sms"), py::arg("stream"));
  module.def("weighted_swiglu", &weighted_swiglu, no_gil, py::kw_only(), py::arg("projected"), py::arg("row_weights"),
             py::arg("dtype"), py::arg("out"), py::arg("num_rows_device"), py::arg("num_rows"), py::arg("ffn"),
             py::arg("num_sms"), py::arg("stream"));
  module.def("weighted_swiglu_backward", &weighted_swiglu_backward, no_gil, py::kw_only(), py::arg("projected"),
             py::arg("row_weights"), py::arg("grad_out"), py::arg("dtype"), py::arg("grad_projected"),
             py::arg("grad_weights"), py::arg("num_rows_device"), py::arg("num_rows"), py::arg("ffn"),
             py::arg("num_sms"), py::arg("stream"));
  module.def("zero_tail", &zero_tail, no_gil, py::kw_only(), py::arg("rows"), py::arg("num_rows_device"),
             py::arg("num_rows"), py::arg("row_bytes"), py::arg("num_sms"), py::arg("stream"));
}

}  // namespace moe_ep
