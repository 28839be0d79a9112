// SPDX-License-Identifier: Apache-2.0
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "draft_length/acceptance_counts.h"
#include "draft_length/batch_end.h"
#include "draft_length/price_surface.h"

namespace nb = nanobind;

namespace {

using Out = nb::ndarray<nb::numpy, double, nb::ndim<2>>;
using In = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PlaceRow = std::tuple<double, double, bool>;
using TermRow = std::pair<size_t, double>;
using RelationRow = std::tuple<std::vector<TermRow>, double, double>;

Out array(dflash::Matrix matrix) {
  auto* owned = new dflash::Matrix(std::move(matrix));
  const nb::capsule owner(owned,
                          [](void* data) noexcept { delete static_cast<dflash::Matrix*>(data); });
  return Out(owned->values.data(), {owned->rows, owned->cols}, owner);
}

dflash::Matrix matrix(const In& values) {
  dflash::Matrix copy(values.shape(0), values.shape(1));
  std::copy_n(values.data(), copy.values.size(), copy.values.data());
  return copy;
}

std::vector<dflash::Place> places(const std::vector<PlaceRow>& rows) {
  std::vector<dflash::Place> found;
  for (const auto& [requests, share, drafting] : rows) found.push_back({requests, share, drafting});
  return found;
}

std::pair<std::vector<double>, Out> estimate(const std::vector<PlaceRow>& at,
                                             const std::vector<RelationRow>& known,
                                             std::pair<double, double> scale,
                                             const std::vector<PlaceRow>& asked) {
  std::vector<dflash::Relation> relations;
  for (const auto& [terms, seconds, variance] : known) {
    dflash::Relation relation{{}, seconds, variance};
    for (const auto& [place, weight] : terms) relation.terms.push_back({place, weight});
    relations.push_back(std::move(relation));
  }
  dflash::Estimate found = dflash::estimate_prices(
      places(at), relations, {scale.first, scale.second}, places(asked));
  return {std::move(found.seconds), array(std::move(found.covariance))};
}

}  // namespace

void bind_draft_length(nb::module_& module) {
  using dflash::AcceptanceCounts;
  nb::class_<AcceptanceCounts>(module, "AcceptanceCounts")
      .def(nb::init<size_t>(), nb::arg("num_positions"))
      .def_prop_ro("num_positions", &AcceptanceCounts::num_positions)
      .def("observe", &AcceptanceCounts::observe, nb::arg("slots"), nb::arg("proposed"),
           nb::arg("accepted"))
      .def("release", &AcceptanceCounts::release, nb::arg("slot"))
      .def(
          "reached",
          [](const AcceptanceCounts& counts, const std::vector<int64_t>& slots,
             bool like_earlier_ones) { return array(counts.reached(slots, like_earlier_ones)); },
          nb::arg("slots"), nb::arg("like_earlier_ones") = false)
      .def("expected_tokens", &AcceptanceCounts::expected_tokens);
  module.def("estimate_prices", &estimate, nb::arg("places"), nb::arg("known"), nb::arg("scale"),
             nb::arg("asked"));
  module.def(
      "seconds_to_end",
      [](const std::vector<double>& remaining, const In& reached, const std::vector<double>& sizes,
         const In& seconds) {
        return dflash::seconds_to_end(remaining, matrix(reached), sizes, matrix(seconds));
      },
      nb::arg("remaining"), nb::arg("reached"), nb::arg("sizes"), nb::arg("seconds"));
}
