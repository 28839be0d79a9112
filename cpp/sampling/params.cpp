// SPDX-License-Identifier: Apache-2.0
#include "sampling/params.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace dflash {

static void expect(bool holds, const char* what, double found) {
  if (holds) return;
  std::ostringstream message;
  message.precision(std::numeric_limits<double>::max_digits10);
  message << "expected " << what << ", found " << found;
  throw std::invalid_argument(message.str());
}

void check(const SamplerParams& params) {
  const double temperature = params.temperature;
  expect(temperature >= 0 && std::isfinite(temperature), "a finite temperature that is not negative (0: greedy)",
         temperature);
  expect(params.top_k >= 0, "top_k >= 0 (0: off)", params.top_k);
  expect(params.top_p > 0 && params.top_p <= 1, "top_p in (0, 1] (1: off)", params.top_p);
  expect(params.min_p >= 0 && params.min_p <= 1, "min_p in [0, 1] (0: off)", params.min_p);
  const double repetition = params.repetition_penalty;
  expect(repetition > 0 && std::isfinite(repetition), "a positive finite repetition_penalty (1: off)", repetition);
  const double presence = params.presence_penalty;
  expect(std::isfinite(presence), "a finite presence_penalty (0: off)", presence);
  const double frequency = params.frequency_penalty;
  expect(std::isfinite(frequency), "a finite frequency_penalty (0: off)", frequency);
}

}  // namespace dflash
