// SPDX-License-Identifier: Apache-2.0
#include "sampling/sampling.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "sampling/philox.h"

namespace nb = nanobind;

using LogitRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LogitRow = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutProbabilities = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdArray = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TokenIds = std::optional<IdArray>;
using Candidates = std::optional<nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;
using Probabilities = std::optional<nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

constexpr int64_t kMaxUniforms = 65536;  // memory for one call, reused for every row of a block

static dflash::Logits view(const LogitRows& logits) {
  return {.data = logits.data(),
          .rows = static_cast<int64_t>(logits.shape(0)),
          .vocab = static_cast<int64_t>(logits.shape(1))};
}

static dflash::History view(const TokenIds& prompt_ids, const TokenIds& output_ids) {
  const auto ids = [](const TokenIds& array) -> std::span<const int64_t> {
    if (!array) return {};
    return {array->data(), array->shape(0)};
  };
  return {.prompt = ids(prompt_ids), .output = ids(output_ids)};
}

static dflash::ProposalDistributions view(const Candidates& tokens, const Probabilities& probabilities) {
  if (!tokens || !probabilities) return {};
  return {.tokens = {tokens->data(), tokens->size()},
          .probabilities = {probabilities->data(), probabilities->size()},
          .width = tokens->shape(1)};
}

static void bind_params(nb::module_& module) {
  using dflash::SamplerParams;
  nb::class_<SamplerParams>(module, "SamplerParams")
      .def(
          "__init__",
          [](SamplerParams* self, double temperature, int32_t top_k, double top_p, double min_p,
             double repetition_penalty, double presence_penalty, double frequency_penalty, uint64_t seed) {
            const SamplerParams params{temperature,       top_k, top_p, min_p, repetition_penalty, presence_penalty,
                                       frequency_penalty, seed};
            dflash::check(params);
            new (self) SamplerParams(params);
          },
          nb::kw_only(), nb::arg("temperature") = 1.0, nb::arg("top_k") = 0, nb::arg("top_p") = 1.0,
          nb::arg("min_p") = 0.0, nb::arg("repetition_penalty") = 1.0, nb::arg("presence_penalty") = 0.0,
          nb::arg("frequency_penalty") = 0.0, nb::arg("seed") = 0)
      .def_ro("temperature", &SamplerParams::temperature)
      .def_ro("top_k", &SamplerParams::top_k)
      .def_ro("top_p", &SamplerParams::top_p)
      .def_ro("min_p", &SamplerParams::min_p)
      .def_ro("repetition_penalty", &SamplerParams::repetition_penalty)
      .def_ro("presence_penalty", &SamplerParams::presence_penalty)
      .def_ro("frequency_penalty", &SamplerParams::frequency_penalty)
      .def_ro("seed", &SamplerParams::seed);
}

void bind_sampling(nb::module_& module) {
  bind_params(module);
  module.def("philox4x32", &dflash::philox4x32, nb::arg("counter"), nb::arg("key"));
  module.def(
      "uniform_bits",
      [](uint64_t seed, uint64_t position, int64_t count, int64_t draw) {
        expect(count >= 0 && count <= kMaxUniforms, "0 to 65536 output positions", count);
        expect(draw >= 0 && draw <= 2, "draw 0, 1 or 2", draw);
        std::vector<uint64_t> bits;
        for (int64_t i = 0; i < count; ++i) {
          const uint64_t place = position + static_cast<uint64_t>(i);
          bits.push_back(dflash::uniform_bits(seed, place, static_cast<dflash::Draw>(draw)));
        }
        return bits;
      },
      nb::arg("seed"), nb::arg("position"), nb::arg("count"), nb::arg("draw") = 0);
  module.def(
      "verify_block",
      [](const LogitRows& logits, const std::vector<int64_t>& proposals, const dflash::SamplerParams& params,
         uint64_t position, const TokenIds& prompt_ids, const TokenIds& output_ids, const Candidates& candidate_ids,
         const Probabilities& probabilities) {
        const nb::gil_scoped_release release;
        return dflash::verify_block(view(logits), proposals, params, position, view(prompt_ids, output_ids),
                                    view(candidate_ids, probabilities));
      },
      nb::arg("logits").noconvert(), nb::arg("proposals"), nb::arg("params"), nb::arg("position"),
      nb::arg("prompt_ids").noconvert() = nb::none(), nb::arg("output_ids").noconvert() = nb::none(),
      nb::arg("candidate_ids").noconvert() = nb::none(), nb::arg("probabilities").noconvert() = nb::none());
  module.def(
      "token_probabilities",
      [](const LogitRow& logits, const dflash::SamplerParams& params, const OutProbabilities& out,
         const TokenIds& prompt_ids, const TokenIds& output_ids) {
        const nb::gil_scoped_release release;
        dflash::token_probabilities({logits.data(), logits.shape(0)}, params, view(prompt_ids, output_ids),
                                    {out.data(), out.shape(0)});
      },
      nb::arg("logits").noconvert(), nb::arg("params"), nb::arg("out").noconvert(),
      nb::arg("prompt_ids").noconvert() = nb::none(), nb::arg("output_ids").noconvert() = nb::none());
  module.def(
      "token_logprobs",
      [](const LogitRows& logits, const std::vector<int64_t>& token_ids) {
        const nb::gil_scoped_release release;
        return dflash::token_logprobs(view(logits), token_ids);
      },
      nb::arg("logits").noconvert(), nb::arg("token_ids"));
}
