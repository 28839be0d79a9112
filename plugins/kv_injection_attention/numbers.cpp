// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace dflash::kv_injection {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// 1 sign bit, 5 exponent bits (bias 15), 10 mantissa bits.
float from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int mantissa = bits & 0x3ff;
  float size = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 0x1f) size = mantissa == 0 ? kInfinity : kNaN;
  return bits & 0x8000 ? -size : size;
}

// 1 sign bit, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, NaN is all ones.
float from_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 0xf;
  const int mantissa = bits & 0x7;
  float size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if (exponent == 0xf && mantissa == 0x7) size = kNaN;
  return bits & 0x80 ? -size : size;
}

// Bits, without the sign, of a number in a format with `fraction` mantissa bits and normal numbers from 2^least on.
// `most` is the bit pattern of infinity, or of the largest number if the format has no infinity.
int64_t encode(double value, int fraction, int least, int64_t most) {
  if (std::isinf(value)) return most;
  // Numbers near `value` are multiples of 2^unit.
  const int unit = std::max(std::ilogb(value), least) - fraction;  // ilogb(0) is INT_MIN
  const auto multiple = static_cast<int64_t>(std::nearbyint(std::ldexp(std::fabs(value), -unit)));
  // The leading bit of a normal number and a carry each add one to the exponent field.
  return std::min((int64_t{unit + fraction - least} << fraction) + multiple, most);
}

}  // namespace

float load(const void* tensor, int64_t index, DType dtype) {
  if (dtype == DType::kF8E4M3) return from_e4m3(static_cast<const uint8_t*>(tensor)[index]);
  const uint16_t bits = static_cast<const uint16_t*>(tensor)[index];
  return dtype == DType::kF16 ? from_f16(bits) : from_bf16(bits);
}

void store(void* tensor, int64_t index, double value, DType dtype) {
  const bool is_nan = std::isnan(value);
  const int64_t sign = std::signbit(value) && !is_nan ? 1 : 0;
  if (dtype == DType::kF8E4M3) {
    const int64_t size = is_nan ? 0x7f : encode(value, 3, -6, 0x7e);
    static_cast<uint8_t*>(tensor)[index] = static_cast<uint8_t>(sign << 7 | size);
    return;
  }
  const int64_t size =
      is_nan ? 0x7fff : dtype == DType::kF16 ? encode(value, 10, -14, 0x7c00) : encode(value, 7, -126, 0x7f80);
  static_cast<uint16_t*>(tensor)[index] = static_cast<uint16_t>(sign << 15 | size);
}

}  // namespace dflash::kv_injection
