// SPDX-License-Identifier: Apache-2.0
#include "acceptance/greedy.h"

#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;

void bind_acceptance(nb::module_& module) {
  module.def(
      "accept_greedy",
      [](const std::vector<int64_t>& proposals, const std::vector<int64_t>& verified) {
        return dflash::accept_greedy(proposals, verified);
      },
      nb::arg("proposals"), nb::arg("verified"));
}
