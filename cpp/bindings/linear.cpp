// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "linear/bfloat16.h"
#include "linear/panels.h"

namespace nb = nanobind;

void bind_linear(nb::module_& module) {
  module.def(
      "linear_bfloat16",
      [](uintptr_t x, int64_t rows, uintptr_t weight, int64_t num_outputs, int64_t num_inputs, uintptr_t bias,
         uintptr_t out, int threads, uintptr_t start, const std::string& isa) {
        const dflash::Bfloat16Linear layer{.num_rows = rows,
                                           .num_inputs = num_inputs,
                                           .num_outputs = num_outputs,
                                           .x = reinterpret_cast<const uint16_t*>(x),
                                           .weight = reinterpret_cast<const uint16_t*>(weight),
                                           .bias = reinterpret_cast<const uint16_t*>(bias),
                                           .out = reinterpret_cast<uint16_t*>(out)};
        const dflash::Threads team{threads, reinterpret_cast<dflash::GompParallel>(start)};
        const nb::gil_scoped_release release;
        dflash::linear(layer, team, isa);
      },
      nb::arg("x"), nb::arg("rows"), nb::arg("weight"), nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("bias"),
      nb::arg("out"), nb::arg("threads"), nb::arg("start"), nb::arg("isa") = "best");
  module.attr("PANEL") = dflash::kPanel;
  module.def(
      "linear_panels",
      [](uintptr_t x, const std::vector<int64_t>& counts, uintptr_t panels, int64_t num_outputs, int64_t num_inputs,
         uintptr_t bias, uintptr_t out, int threads, uintptr_t start, const std::string& isa) {
        const dflash::PanelLinears layers{.num_rows = counts,
                                         .num_inputs = num_inputs,
                                         .num_outputs = num_outputs,
                                         .x = reinterpret_cast<const float*>(x),
                                         .panels = reinterpret_cast<const float*>(panels),
                                         .bias = reinterpret_cast<const float*>(bias),
                                         .out = reinterpret_cast<float*>(out)};
        const dflash::Threads team{threads, reinterpret_cast<dflash::GompParallel>(start)};
        const nb::gil_scoped_release release;
        dflash::linear(layers, team, isa);
      },
      nb::arg("x"), nb::arg("counts"), nb::arg("panels"), nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("bias"),
      nb::arg("out"), nb::arg("threads"), nb::arg("start"), nb::arg("isa") = "best");
}
