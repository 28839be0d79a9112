// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace dflash {

// A row's probabilities are stored as proportional integers, so that sums are exact in any order: no compiler,
// instruction set or algorithm can move a token across a boundary.
constexpr int kWeightBits = 43;
constexpr uint64_t kMaxWeight = uint64_t{1} << kWeightBits;      // weight of the most likely token
constexpr int64_t kMaxVocab = int64_t{1} << (63 - kWeightBits);  // a row's sum fits 63 bits

struct Largest {
  float logit;
  int64_t token;  // the first that has it
};

// Returns the largest logit; nothing for a row with NaN or +infinity, or that is -infinity throughout (-infinity among
// others is a token that cannot occur).
std::optional<Largest> largest(std::span<const float> logits);

// Returns the largest logit, or throws std::invalid_argument, naming row and token.
Largest checked_largest(std::span<const float> logits, int64_t row);

// weights[v] = round(2^43 exp((logits[v] - max) / temperature)), to a unit, for temperature > 0.
void to_weights(std::span<const float> logits, float max, double temperature, std::span<uint64_t> weights);

}  // namespace dflash
