// The part of moe_ep._C that casts to FP8 for the experts; the Python signatures are in moe_ep/_native_fp8.py.
#include <pybind11/pybind11.h>

#include <string>

#include "binding.h"
#include "check.h"
#include "fp8_tiles.h"

namespace py = pybind11;

namespace moe_ep {
namespace {

TileSource tile_source_from(const std::string& name) {
  if (name == "rows") {
    return TileSource::kRows;
  }
  if (name == "swiglu") {
    return TileSource::kSwiglu;
  }
  if (name == "swiglu_grad") {
    return TileSource::kSwigluGrad;
  }
  MOE_EP_CHECK(name == "fp8", "source is ", name,
               ", but rows, swiglu, swiglu_grad and fp8 are supported: name one of them.");
  return TileSource::kFp8;
}

void fp8_cast_tiles(const std::string& source, const std::string& dtype, uintptr_t x, uintptr_t x_scales,
                    uintptr_t grads, uintptr_t tiles, int64_t num_tiles, int64_t width, uintptr_t rows,
                    uintptr_t row_scales, uintptr_t columns, uintptr_t column_scales, bool one_scale, bool power_of_two,
                    uintptr_t stream) {
  const TileOutputs outputs = {pointer_from<void>(rows), pointer_from<float>(row_scales), pointer_from<void>(columns),
                               pointer_from<float>(column_scales)};
  launch_fp8_cast_tiles(tile_source_from(source), row_type_from(dtype), pointer_from<const void>(x),
                        pointer_from<const float>(x_scales), pointer_from<const void>(grads),
                        pointer_from<const RowTile>(tiles), num_tiles, width, outputs, one_scale, power_of_two,
                        stream_from(stream));
}

void fp8_pack_scales(uintptr_t scales, uintptr_t tiles, int64_t num_tiles, int64_t num_blocks, uintptr_t packed,
                     uintptr_t stream) {
  launch_fp8_pack_scales(pointer_from<const float>(scales), pointer_from<const RowTile>(tiles), num_tiles, num_blocks,
                         pointer_from<float>(packed), stream_from(stream));
}

}  // namespace

void bind_fp8_kernels(py::module_& module) {
  const NoGil no_gil;
  module.def("fp8_cast_tiles", &fp8_cast_tiles, no_gil, py::kw_only(), py::arg("source"), py::arg("dtype"),
             py::arg("x"), py::arg("x_scales"), py::arg("grads"), py::arg("tiles"), py::arg("num_tiles"),
             py::arg("width"), py::arg("rows"), py::arg("row_scales"), py::arg("columns"), py::arg("column_scales"),
             py::arg("one_scale"), py::arg("power_of_two"), py::arg("stream"));
  module.def("fp8_pack_scales", &fp8_pack_scales, no_gil, py::kw_only(), py::arg("scales"), py::arg("tiles"),
             py::arg("num_tiles"), py::arg("num_blocks"), py::arg("packed"), py::arg("stream"));
}

}  // namespace moe_ep
