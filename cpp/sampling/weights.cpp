// SPDX-License-Identifier: Apache-2.0
#include "sampling/weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace dflash {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLowest = -40;  // exp(-40) is far below half a unit of a weight

// Adding it moves a double's integer part, rounded to nearest even, to the low bits.
constexpr double kToInteger = 0x1.8p52;

// round(2^43 exp(x)) for x <= 0. Not std::exp, whose last bit depends on the library and the CPU and which compilers do
// not vectorise.
uint64_t fixed_point_exp(double x) {
  x = x > kLowest ? x : kLowest;
  // exp(x) = 2^n exp(r) with |r| <= ln(2) / 2; ln(2) in two parts, so that n * kLn2High is exact.
  constexpr double kLog2E = 0x1.71547652b82fep0;
  constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;
  const double shifted = x * kLog2E + kToInteger;
  const double n = shifted - kToInteger;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  // Taylor's series to r^11 / 11!, which leaves 2^-47.
  double sum = 1.0 / 39916800;
  for (const double coefficient : {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24,
                                   1.0 / 6, 1.0 / 2, 1.0, 1.0}) {
    sum = sum * r + coefficient;
  }
  // 2^(n + 43): n in the low bits of `shifted` goes to the exponent, the rest is shifted out.
  const auto power = std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023 + kWeightBits) << 52);
  return std::bit_cast<uint64_t>(sum * power + kToInteger) - std::bit_cast<uint64_t>(kToInteger);
}

}  // namespace

std::optional<Largest> largest(std::span<const float> logits) {
  // Compilers vectorise an integer maximum. With the low bits of negative numbers flipped, the bits of floats order
  // like the floats. Only the part that has the largest is searched for its token.
  constexpr int32_t kMagnitude = 0x7fffffff;
  constexpr size_t kPart = 4096;
  float best = -kInfinity;
  size_t place = 0;
  for (size_t begin = 0; begin < logits.size(); begin += kPart) {
    int32_t greatest = std::numeric_limits<int32_t>::min();
    int32_t greatest_magnitude = 0;
    for (const float logit : logits.subspan(begin, std::min(kPart, logits.size() - begin))) {
      const auto bits = std::bit_cast<int32_t>(logit);
      greatest = std::max(greatest, bits ^ ((bits >> 31) & kMagnitude));
      greatest_magnitude = std::max(greatest_magnitude, bits & kMagnitude);
    }
    if (greatest_magnitude > std::bit_cast<int32_t>(kInfinity)) return {};  // NaN
    const auto max = std::bit_cast<float>(greatest ^ ((greatest >> 31) & kMagnitude));
    if (max > best) {
      best = max;
      place = begin;
    }
  }
  if (!std::isfinite(best)) return {};
  return Largest{.logit = best, .token = std::find(logits.begin() + place, logits.end(), best) - logits.begin()};
}

Largest checked_largest(std::span<const float> logits, int64_t row) {
  if (const std::optional<Largest> found = largest(logits)) return *found;
  const auto bad = std::ranges::find_if(logits, [](float x) { return !(x < kInfinity); });
  const std::string token = bad == logits.end() ? "" : " for token " + std::to_string(bad - logits.begin());
  const char* what = bad == logits.end() ? "-infinity throughout" : std::isnan(*bad) ? "NaN" : "+infinity";
  throw std::invalid_argument("expected logits that are finite, or -infinity for some, found " + (what + token) +
                              " in row " + std::to_string(row));
}

void to_weights(std::span<const float> logits, float max, double temperature, std::span<uint64_t> weights) {
  for (size_t token = 0; token < logits.size(); ++token) {
    weights[token] = fixed_point_exp((double{logits[token]} - max) / temperature);
  }
}

}  // namespace dflash
