// SPDX-License-Identifier: Apache-2.0
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "cpu/isa.h"
#include "packing/pack.h"

namespace nb = nanobind;

using AnyWeights = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutScales = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

static dflash::WeightType weight_type(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype == nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  if (is(Code::Bfloat, 16) || is(Code::UInt, 16)) return dflash::WeightType::kBf16;
  if (is(Code::Float, 16)) return dflash::WeightType::kF16;
  if (is(Code::Float, 32)) return dflash::WeightType::kF32;
  throw nb::type_error("expected weights of type uint16 (the bits of bfloat16), float16 or float32");
}

static dflash::Weights view(const AnyWeights& weights) {
  return {.data = static_cast<const std::byte*>(weights.data()),
          .type = weight_type(weights.dtype()),
          .rows = static_cast<int64_t>(weights.shape(0)),
          .cols = static_cast<int64_t>(weights.shape(1))};
}

template <class Matrix, class Array>
static Matrix output(const Array& out) {
  return {.data = out.data(), .rows = static_cast<int64_t>(out.shape(0)), .cols = static_cast<int64_t>(out.shape(1))};
}

void bind_packing(nb::module_& module) {
  nb::exception<dflash::NonFiniteError>(module, "NonFiniteError", PyExc_ValueError);
  module.def("cpu_features", &dflash::usable_isas);
  module.def(
      "amax",
      [](const AnyWeights& weights, int threads) {
        const auto matrix = view(weights);
        const nb::gil_scoped_release release;
        return dflash::amax(matrix, threads);
      },
      nb::arg("weights").noconvert(), nb::arg("threads") = 0);
  module.def(
      "pack_fp8",
      [](const AnyWeights& weights, float scale, const OutBytes& out, int threads) {
        const auto matrix = view(weights);
        const auto bytes = output<dflash::Bytes>(out);
        const nb::gil_scoped_release release;
        dflash::pack_fp8(matrix, scale, bytes, threads);
      },
      nb::arg("weights").noconvert(), nb::arg("scale"), nb::arg("out").noconvert(), nb::arg("threads") = 0);
  module.def(
      "pack_nvfp4",
      [](const AnyWeights& weights, float scale_2, const OutBytes& out_data, const OutBytes& out_scales, int threads) {
        const auto matrix = view(weights);
        const auto data = output<dflash::Bytes>(out_data);
        const auto scales = output<dflash::Bytes>(out_scales);
        const nb::gil_scoped_release release;
        dflash::pack_nvfp4(matrix, scale_2, data, scales, threads);
      },
      nb::arg("weights").noconvert(), nb::arg("scale_2"), nb::arg("out_data").noconvert(),
      nb::arg("out_scales").noconvert(), nb::arg("threads") = 0);
  module.def(
      "pack_int4",
      [](const AnyWeights& weights, const OutBytes& out_data, const OutScales& out_scales, int threads) {
        const auto matrix = view(weights);
        const auto data = output<dflash::Bytes>(out_data);
        const auto scales = output<dflash::Scales>(out_scales);
        const nb::gil_scoped_release release;
        dflash::pack_int4(matrix, data, scales, threads);
      },
      nb::arg("weights").noconvert(), nb::arg("out_data").noconvert(), nb::arg("out_scales").noconvert(),
      nb::arg("threads") = 0);
}
