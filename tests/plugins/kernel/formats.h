// SPDX-License-Identifier: Apache-2.0
// FP16, BF16 and E4M3 to and from FP32, rounding to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace emulator {

inline float decode_bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

inline uint32_t encode_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float compute_f16(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const float mantissa = static_cast<float>(bits & 1023);
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

inline float decode_f16(uint32_t bits) {
  static const auto all = [] {
    std::vector<float> values(1 << 16);
    for (uint32_t i = 0; i < values.size(); ++i) values[i] = compute_f16(i);
    return values;
  }();
  return all[bits];
}

inline uint32_t encode_f16(float value) {
  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 16 & 0x8000;
  if (std::isnan(value)) return 0x7fff;
  const float size = std::fabs(value);
  if (size >= 65520) return sign | 0x7c00;
  int exponent;
  std::frexp(size, &exponent);  // size = m * 2^exponent with m in [0.5, 1)
  if (size == 0 || exponent < -13) {
    return sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 24)));
  }
  // 11 bits of m; a carry out of them raises the exponent by itself.
  const auto mantissa = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  return sign | ((static_cast<uint32_t>(exponent + 13) << 10) + mantissa);
}

inline float decode_e4m3(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 3 & 15);
  const float mantissa = static_cast<float>(bits & 7);
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if ((bits & 0x7f) == 0x7f) return NAN;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}

// Saturates at 448.
inline uint32_t encode_e4m3(float value) {
  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 24 & 0x80;
  if (std::isnan(value)) return 0x7f;
  const float size = std::fabs(value);
  if (size >= 448) return sign | 0x7e;
  int exponent;
  std::frexp(size, &exponent);  // size = m * 2^exponent with m in [0.5, 1)
  if (size == 0 || exponent < -5) return sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 9)));
  // 4 bits of m; a carry out of them raises the exponent by itself.
  const auto mantissa = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 4 - exponent)));
  return sign | ((static_cast<uint32_t>(exponent + 5) << 3) + mantissa);
}

}  // namespace emulator
