// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

// How one request is sampled; the defaults sample from softmax(logits).
struct SamplerParams {
  double temperature = 1;         // 0: the argmax
  int32_t top_k = 0;              // 0: off
  double top_p = 1;               // 1: off
  double min_p = 0;               // 0: off
  double repetition_penalty = 1;  // 1: off; divides (or multiplies negative) logits of tokens of the history
  double presence_penalty = 0;    // subtracted once from the logit of a token of the output
  double frequency_penalty = 0;   // subtracted for every time a token stands in the output
  uint64_t seed = 0;

  bool has_penalties() const { return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0; }
};

// Throws std::invalid_argument, with what was expected and found, for a value out of range.
void check(const SamplerParams& params);

}  // namespace dflash
