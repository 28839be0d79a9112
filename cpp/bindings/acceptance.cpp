// SPDX-License-Identifier: Apache-2.0
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "acceptance/greedy.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

template <typename Logit>
using Rows = nb::ndarray<const Logit, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename Logit>
static std::pair<std::vector<int64_t>, std::vector<bool>> argmax_and_finite(const Rows<Logit>& logits) {
  const nb::gil_scoped_release release;
  auto choices = dflash::argmax_and_finite(logits.data(), logits.shape(0), logits.shape(1));
  return {std::move(choices.tokens), std::move(choices.are_finite)};
}

void bind_acceptance(nb::module_& module) {
  module.def(
      "accept_greedy",
      [](const std::vector<int64_t>& proposals, const std::vector<int64_t>& verified) {
        return dflash::accept_greedy(proposals, verified);
      },
      nb::arg("proposals"), nb::arg("verified"));
  module.def("argmax_and_finite", &argmax_and_finite<float>, nb::arg("logits").noconvert());
  module.def("argmax_and_finite", &argmax_and_finite<uint16_t>, nb::arg("logits").noconvert());
}
