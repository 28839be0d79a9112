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

[[noreturn]] void throw_unusable(int64_t row, const std::string& found) {
  throw std::invalid_argument("expected logits that are finite, or -infinity for some, found " + found + " in row " +
                              std::to_string(row));
}

}  // namespace

float checked_max(std::span<const float> logits, int64_t row) {
  // Compilers vectorise an integer maximum. With the low bits of negative numbers flipped, the bits of floats order
  // like the floats.
  constexpr int32_t kMagnitude = 0x7fffffff;
  int32_t largest = std::numeric_limits<int32_t>::min();
  int32_t largest_magnitude = 0;
  for (const float logit : logits) {
    const auto bits = std::bit_cast<int32_t>(logit);
    largest = std::max(largest, bits ^ ((bits >> 31) & kMagnitude));
    largest_magnitude = std::max(largest_magnitude, bits & kMagnitude);
  }
  const auto max = std::bit_cast<float>(largest ^ ((largest >> 31) & kMagnitude));
  const bool has_nan = largest_magnitude > std::bit_cast<int32_t>(kInfinity);
  if (!has_nan && std::isfinite(max)) return max;
  if (!has_nan && max < 0) throw_unusable(row, "-infinity throughout");
  const auto bad = std::ranges::find_if(logits, [](float x) { return !(x < kInfinity); });
  throw_unusable(
      row, std::string(std::isnan(*bad) ? "NaN" : "+infinity") + " for token " + std::to_string(bad - logits.begin()));
}

void to_weights(std::span<const float> logits, float max, double temperature, std::span<uint64_t> weights) {
  for (size_t token = 0; token < logits.size(); ++token) {
    weights[token] = fixed_point_exp((double{logits[token]} - max) / temperature);
  }
}

}  // namespace dflash
