// The part of moe_ep._C that casts to FP8 for the experts; the Python signatures are in moe_ep/_native/fp8.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/binding.h"
#include "common/check.h"
#include "fp8/products.h"
#include "fp8/tiles.h"

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
                    uintptr_t grads, uintptr_t row_weights, uintptr_t tiles, int64_t num_tiles, int64_t width,
                    uintptr_t rows, uintptr_t row_scales, uintptr_t columns, uintptr_t column_scales,
                    uintptr_t weight_sums, bool one_scale, bool power_of_two, uintptr_t stream) {
  const TileInputs inputs = {tile_source_from(source),        row_type_from(dtype),
                             pointer_from<const void>(x),     pointer_from<const float>(x_scales),
                             pointer_from<const void>(grads), pointer_from<const float>(row_weights)};
  const TileOutputs outputs = {pointer_from<void>(rows), pointer_from<float>(row_scales), pointer_from<void>(columns),
                               pointer_from<float>(column_scales), pointer_from<float>(weight_sums)};
  launch_fp8_cast_tiles(inputs, pointer_from<const RowTile>(tiles), num_tiles, width, outputs, one_scale, power_of_two,
                        stream_from(stream));
}

void fp8_pack_scales(uintptr_t scales, uintptr_t tiles, int64_t num_tiles, int64_t num_blocks, uintptr_t packed,
                     uintptr_t stream) {
  launch_fp8_pack_scales(pointer_from<const float>(scales), pointer_from<const RowTile>(tiles), num_tiles, num_blocks,
                         pointer_from<float>(packed), stream_from(stream));
}

Fp8Operand operand_from(const std::string& scaling, bool is_e5m2) {
  if (scaling == "rows") {
    return {Fp8Scaling::kRows, is_e5m2};
  }
  if (scaling == "tiles") {
    return {Fp8Scaling::kTiles, is_e5m2};
  }
  MOE_EP_CHECK(scaling == "tensor", "scaling is ", scaling, ", but rows, tiles and tensor are: name one of them.");
  return {Fp8Scaling::kTensor, is_e5m2};
}

std::unique_ptr<Fp8Products> make_products(const std::vector<uintptr_t>& workspaces, size_t workspace_bytes) {
  std::vector<void*> pointers;
  for (const uintptr_t workspace : workspaces) {
    pointers.push_back(pointer_from<void>(workspace));
  }
  return std::make_unique<Fp8Products>(pointers, workspace_bytes);
}

// sizes: m, n, k of every product; pointers: a, its scales, b, its scales, out.
void multiply(Fp8Products& self, const std::vector<int64_t>& sizes, const std::vector<uintptr_t>& pointers,
              const std::string& a_scaling, bool a_is_e5m2, const std::string& b_scaling, bool b_is_e5m2,
              const std::string& out_dtype, uintptr_t stream) {
  MOE_EP_CHECK(sizes.size() % 3 == 0 && pointers.size() == sizes.size() / 3 * 5, "fp8_products: there are ",
               sizes.size(), " sizes and ", pointers.size(), " pointers, but 3 and 5 a product are needed.");
  std::vector<Fp8Product> products;
  products.reserve(sizes.size() / 3);
  for (size_t i = 0; i < sizes.size() / 3; ++i) {
    const int64_t* size = &sizes[3 * i];
    const uintptr_t* at = &pointers[5 * i];
    products.push_back({size[0], size[1], size[2], pointer_from<const void>(at[0]), pointer_from<const void>(at[1]),
                        pointer_from<const void>(at[2]), pointer_from<const void>(at[3]), pointer_from<void>(at[4])});
  }
  self.multiply(products, operand_from(a_scaling, a_is_e5m2), operand_from(b_scaling, b_is_e5m2),
                row_type_from(out_dtype), stream_from(stream));
}

}  // namespace

void bind_fp8_kernels(py::module_& module) {
  const NoGil no_gil;
  module.def("fp8_cast_tiles", &fp8_cast_tiles, no_gil, py::kw_only(), py::arg("source"), py::arg("dtype"),
             py::arg("x"), py::arg("x_scales"), py::arg("grads"), py::arg("row_weights"), py::arg("tiles"),
             py::arg("num_tiles"), py::arg("width"), py::arg("rows"), py::arg("row_scales"), py::arg("columns"),
             py::arg("column_scales"), py::arg("weight_sums"), py::arg("one_scale"), py::arg("power_of_two"),
             py::arg("stream"));
  module.def("fp8_pack_scales", &fp8_pack_scales, no_gil, py::kw_only(), py::arg("scales"), py::arg("tiles"),
             py::arg("num_tiles"), py::arg("num_blocks"), py::arg("packed"), py::arg("stream"));
  module.def("fp8_products_obstacle", &fp8_products_obstacle);
  py::class_<Fp8Products>(module, "Fp8Products")
      .def(py::init(&make_products), py::kw_only(), py::arg("workspaces"), py::arg("workspace_bytes"))
      .def_property_readonly_static("num_streams", [](const py::object&) { return Fp8Products::kStreams; })
      .def("multiply", &multiply, no_gil, py::kw_only(), py::arg("sizes"), py::arg("pointers"), py::arg("a_scaling"),
           py::arg("a_is_e5m2"), py::arg("b_scaling"), py::arg("b_is_e5m2"), py::arg("out_dtype"), py::arg("stream"));
}

}  // namespace moe_ep
