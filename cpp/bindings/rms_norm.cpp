// SPDX-License-Identifier: Apache-2.0
#include "rms_norm/rms_norm.h"

#include "bindings/bindings.h"

namespace nb = nanobind;

void bind_rms_norm(nb::module_& module) {
  module.def(
      "rms_norm",
      [](uintptr_t x, int64_t rows, int64_t dim, uintptr_t weight, float eps, uintptr_t out, int threads,
         uintptr_t start) {
        expect(rows >= 0, "a number of rows", rows);
        expect(dim >= 1, "a dim of at least 1", dim);
        const dflash::Threads openmp_team{threads, reinterpret_cast<dflash::GompParallel>(start)};
        const nb::gil_scoped_release release;
        dflash::rms_norm(reinterpret_cast<const float*>(x), rows, dim, reinterpret_cast<const float*>(weight), eps,
                         reinterpret_cast<float*>(out), openmp_team);
      },
      nb::arg("x"), nb::arg("rows"), nb::arg("dim"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"),
      nb::arg("threads"), nb::arg("start"));
}
