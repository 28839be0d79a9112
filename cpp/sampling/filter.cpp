// SPDX-License-Identifier: Apache-2.0
#include "sampling/filter.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "sampling/weights.h"

namespace dflash {
namespace {

constexpr int kDigitBits = 11;
constexpr int kDigits = 4;
static_assert(kDigits * kDigitBits > kWeightBits);

// Smallest weight such that the larger ones amount to less than `limit` by `measure`. A radix selection from the
// highest digit down: four passes for any row, no sorting.
template <class Measure>
uint64_t select(std::span<const uint64_t> weights, uint64_t limit, Measure measure) {
  uint64_t lowest = 0;
  uint64_t above = 0;
  for (int shift = (kDigits - 1) * kDigitBits; shift >= 0; shift -= kDigitBits) {
    std::array<uint64_t, 1 << kDigitBits> sums{};
    for (const uint64_t weight : weights) {
      // Weights below `lowest` wrap around, so their digits are too large as well.
      const uint64_t digit = (weight - lowest) >> shift;
      if (digit < sums.size()) sums[digit] += measure(weight);
    }
    uint64_t digit = sums.size() - 1;
    for (; digit > 0 && above + sums[digit] < limit; --digit) above += sums[digit];
    lowest += digit << shift;
  }
  return lowest;
}

}  // namespace

uint64_t mass_from(std::span<const uint64_t> weights, uint64_t lowest) {
  uint64_t mass = 0;
  for (const uint64_t weight : weights) mass += weight >= lowest ? weight : 0;
  return mass;
}

uint64_t lowest_kept_weight(std::span<const uint64_t> weights, const SamplerParams& params) {
  uint64_t lowest = 0;
  if (params.top_k > 0) {
    lowest = select(weights, static_cast<uint64_t>(params.top_k), [](uint64_t) { return 1; });
  }
  if (params.top_p < 1) {
    // Never above the mass itself, even in double, so the selection ends within the top k.
    const double limit = std::ceil(static_cast<double>(mass_from(weights, lowest)) * params.top_p);
    lowest = select(weights, static_cast<uint64_t>(limit), [](uint64_t weight) { return weight; });
  }
  const double floor = std::ceil(params.min_p * static_cast<double>(kMaxWeight));
  return std::max(lowest, static_cast<uint64_t>(floor));
}

}  // namespace dflash
