// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "linear/bfloat16.h"
#include "linear/panels.h"

namespace nb = nanobind;

namespace {

template <class Layer, class Number>
void bind(nb::module_& module, const char* name) {
  module.def(
      name,
      [](uintptr_t x, const std::vector<int64_t>& counts, uintptr_t weight, int64_t num_outputs, int64_t num_inputs,
         uintptr_t bias, uintptr_t out, int threads, uintptr_t start, const std::string& isa) {
        for (const int64_t count : counts) expect(count >= 0, "counts of rows", count);
        expect(num_outputs >= 0, "a number of outputs", num_outputs);
        expect(num_inputs >= 0, "a number of inputs", num_inputs);
        const Layer first{.num_rows = 0,
                          .num_inputs = num_inputs,
                          .num_outputs = num_outputs,
                          .x = reinterpret_cast<const Number*>(x),
                          .weight = reinterpret_cast<const Number*>(weight),
                          .bias = reinterpret_cast<const Number*>(bias),
                          .out = reinterpret_cast<Number*>(out)};
        const dflash::Threads openmp_team{threads, reinterpret_cast<dflash::GompParallel>(start)};
        const nb::gil_scoped_release release;
        dflash::linear(first, counts, openmp_team, isa);
      },
      nb::arg("x"), nb::arg("counts"), nb::arg("weight"), nb::arg("num_outputs"), nb::arg("num_inputs"),
      nb::arg("bias"), nb::arg("out"), nb::arg("threads"), nb::arg("start"), nb::arg("isa") = "best");
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.attr("PANEL") = dflash::kPanel;
  bind<dflash::PanelLinear, float>(module, "linear_panels");
  bind<dflash::Bfloat16Linear, uint16_t>(module, "linear_bfloat16");
}
