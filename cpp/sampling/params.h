// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

// Sampling parameters of a request; the defaults sample from softmax(logits).
struct SamplerParams {
  double temperature = 1;         // 0: greedy
  int32_t top_k = 0;              // 0: off
  double top_p = 1;               // 1: off
  double min_p = 0;               // 0: off
  double repetition_penalty = 1;  // 1: off; divides positive and multiplies negative logits of tokens in the history
  double presence_penalty = 0;    // subtracted once from the logit of a token in the output
  double frequency_penalty = 0;   // subtracted for each occurrence of a token in the output
  uint64_t seed = 0;

  bool has_penalties() const { return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0; }
};

// Throws std::invalid_argument, with the expected and actual value, if a value is out of range.
void check(const SamplerParams& params);

}  // namespace dflash
