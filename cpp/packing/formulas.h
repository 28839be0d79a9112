// SPDX-License-Identifier: Apache-2.0
// The formulas of pack.h over a contiguous range, in loops that compilers vectorise for any CPU.
//
// Each function returns max |w| as float32 bits. NaN and infinity are the largest values, so the caller need not check
// again that all weights are finite.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "packing/weights.h"

namespace dflash {

inline constexpr uint32_t kInfinityBits = 0x7f800000;
inline constexpr uint32_t kAbsMask = 0x7fffffff;

inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
// Magnitudes have no sign bit, and SSE2 compares signed integers only.
inline uint32_t larger(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? b : a; }

template <WeightType kType>
float load(const std::byte* weights, int64_t index) {
  if constexpr (kType == WeightType::kF32) {
    float value;
    std::memcpy(&value, weights + index * 4, 4);
    return value;
  } else {
    uint16_t half;
    std::memcpy(&half, weights + index * 2, 2);
    const uint32_t bits = half;
    if constexpr (kType == WeightType::kBf16) return float_of(bits << 16);
    const uint32_t sign = (bits & 0x8000) << 16;
    const uint32_t rest = (bits & 0x7fff) << 13;
    // From float16's exponent bias to float32's; also exact for subnormal numbers.
    const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);
    return float_of(sign | ((bits & 0x7c00) == 0x7c00 ? kInfinityBits | rest : finite));
  }
}

// A small float format with kFraction fraction bits; kMinExponent is the exponent of its smallest normal number.
template <int kFraction, int kMinExponent>
struct Grid {
  static constexpr uint32_t kLeast = (127 + kMinExponent) << 23;

  // Exponent field of |value|. The spacing does not shrink below the smallest normal number.
  static uint32_t exponent(float value) { return larger(bits_of(value) & kInfinityBits, kLeast); }

  // Adding this power of two to value >= 0 rounds it to kFraction fraction bits, ties to even.
  static uint32_t shift(float value) { return exponent(value) + ((23 - kFraction) << 23); }

  static float round(float value) {
    const float large = float_of(shift(value));
    return (value + large) - large;
  }

  static uint32_t encode(float value) {
    const uint32_t steps = bits_of(value + float_of(shift(value))) - shift(value);
    return steps + (((exponent(value) - kLeast) >> 23) << kFraction);
  }
};
using E4m3 = Grid<3, -6>;
using E2m1 = Grid<1, 0>;

template <WeightType kType>
float round_to_type(float value) {
  if constexpr (kType == WeightType::kBf16) return Grid<7, -126>::round(value);
  if constexpr (kType == WeightType::kF16) return Grid<10, -14>::round(value);
  return value;
}

template <WeightType kType>
uint32_t amax_bits(const std::byte* weights, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = larger(largest, bits_of(load<kType>(weights, i)) & kAbsMask);
  return largest;
}

template <WeightType kType>
uint32_t fp8(const std::byte* weights, int64_t count, float scale, uint8_t* __restrict out) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(load<kType>(weights, i));
    largest = larger(largest, bits & kAbsMask);
    const float quotient = std::min(448.0f, float_of(bits & kAbsMask) / scale);
    out[i] = (bits >> 24 & 0x80) | E4m3::encode(round_to_type<kType>(quotient));
  }
  return largest;
}

inline uint32_t e2m1_code(float quotient) {
  const float magnitude = float_of(bits_of(quotient) & kAbsMask);
  // 0 / 0, where scale * scale_2 underflows, saturates like every other quotient there.
  return (quotient < 0 ? 8 : 0) | E2m1::encode(magnitude < 6.0f ? magnitude : 6.0f);
}

template <WeightType kType>
uint32_t nvfp4(const std::byte* weights, int64_t num_blocks, float scale_2, uint8_t* __restrict data,
               uint8_t* __restrict scales) {
  uint32_t largest = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const std::byte* first = weights + block * kBlock * bytes_of(kType);
    const uint32_t block_amax = amax_bits<kType>(first, kBlock);
    largest = larger(largest, block_amax);
    float scale = float_of(block_amax) / (6.0f * scale_2);
    if (scale == 0) scale = 1;
    scale = std::min(448.0f, std::max(0x1p-9f, scale));
    scales[block] = E4m3::encode(scale);
    const float divisor = E4m3::round(scale) * scale_2;
    uint8_t codes[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) codes[i] = e2m1_code(load<kType>(first, i) / divisor);
    for (int64_t i = 0; i < kBlock / 2; ++i) data[block * kBlock / 2 + i] = codes[2 * i] | codes[2 * i + 1] << 4;
  }
  return largest;
}

// Works for any finite magnitude, whereas a Grid's sum overflows above 2^111.
inline float nearest_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

// Values rounded to integers in two's complement, saturating at -8 and 7, and their rounding errors.
struct Int4Codes {
  uint32_t codes[kInt4Block];
  float errors[kInt4Block];

  void round(const float* values, float scale) {
    for (int64_t i = 0; i < kInt4Block; ++i) {
      // Adding 1.5 * 2^23 rounds to an integer, whose two's complement is in the lowest bits of the sum.
      const float shifted = std::clamp(values[i] / scale, -8.0f, 7.0f) + 0x1.8p23f;
      codes[i] = bits_of(shifted);
      errors[i] = values[i] - (shifted - 0x1.8p23f) * scale;  // the product is exact, so compilers may fuse it
    }
  }

  double squared_error() const {
    double sum = 0;
    for (const float error : errors) sum += double{error} * error;  // exact products, as above
    return sum;
  }
};

// Encodes one block of a row with the scale, out of a few, that has the smallest error.
template <WeightType kType>
uint32_t int4_block(const std::byte* weights, float* scale, uint8_t* __restrict codes) {
  const uint32_t largest = amax_bits<kType>(weights, kInt4Block);
  float values[kInt4Block];
  for (int64_t i = 0; i < kInt4Block; ++i) values[i] = load<kType>(weights, i);
  double least = std::numeric_limits<double>::infinity();
  Int4Codes candidate;
  *scale = 1;
  for (const float steps : kInt4Steps) {
    const float rounded = nearest_bfloat16(float_of(largest) / steps);
    if (rounded == 0) break;
    candidate.round(values, rounded);
    const double error = candidate.squared_error();
    if (!(error < least)) continue;
    least = error;
    *scale = rounded;
    for (int64_t i = 0; i < kInt4Block; ++i) codes[i] = candidate.codes[i] & 15;
  }
  if (least == std::numeric_limits<double>::infinity()) std::memset(codes, 0, kInt4Block);
  return largest;
}

// Encodes blocks [begin, end), numbered along one pair of rows after the other.
template <WeightType kType>
uint32_t int4(const std::byte* weights, int64_t cols, int64_t begin, int64_t end, uint8_t* __restrict data,
              float* __restrict scales) {
  const int64_t blocks = cols / kInt4Block;
  uint32_t largest = 0;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t row = block / blocks * 2, column = block % blocks;
    uint8_t codes[2][kInt4Block];
    for (int64_t i = 0; i < 2; ++i) {
      const std::byte* first = weights + ((row + i) * cols + column * kInt4Block) * bytes_of(kType);
      largest = larger(largest, int4_block<kType>(first, &scales[(row + i) * blocks + column], codes[i]));
    }
    for (int64_t i = 0; i < kInt4Block; ++i) data[block * kInt4Block + i] = codes[0][i] | codes[1][i] << 4;
  }
  return largest;
}

}  // namespace dflash
