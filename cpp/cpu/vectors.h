// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/lanes.h"

// 16 floats by the vector extensions of GCC and Clang, which make them of what the instruction set
// has. As in packing/vector_kernels.h everything has internal linkage, because each including file
// is compiled for its own.

namespace dflash {
namespace {

typedef float Floats16 __attribute__((vector_size(4 * kLanes)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef int32_t Ints16 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));

using Bf16 = uint16_t;  // its bits

inline float to_float(float value) { return value; }
inline float to_float(Bf16 bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline Floats16 load(const float* at) {
  Floats16 values;
  std::memcpy(&values, at, sizeof values);
  return values;
}

inline Floats16 load(const Bf16* at) {
  Halves16 bits;
  std::memcpy(&bits, at, sizeof bits);
  return (Floats16)(__builtin_convertvector(bits, Words16) << 16);
}

inline void store(Floats16 values, float* out) { std::memcpy(out, &values, sizeof values); }

inline void store(Floats16 values, Bf16* out) {  // rounds to nearest even, a NaN to a quiet one
  const Words16 bits = (Words16)values;
  const Words16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words16 word = values == values ? rounded : (bits >> 16 | 0x40);
  const Halves16 halves = __builtin_convertvector(word, Halves16);
  std::memcpy(out, &halves, sizeof halves);
}

inline Floats16 max(Floats16 a, Floats16 b) { return a > b ? a : b; }

// By halves, in one order whatever the instruction set.
template <class Combine>
float reduced(Floats16 values, Combine combine) {
  const auto eights = std::bit_cast<std::array<Floats8, 2>>(values);
  const auto fours = std::bit_cast<std::array<Floats4, 2>>(combine(eights[0], eights[1]));
  const Floats4 four = combine(fours[0], fours[1]);
  const std::array<float, 4> v = std::bit_cast<std::array<float, 4>>(four);
  return combine(combine(v[0], v[2]), combine(v[1], v[3]));
}

inline float largest(Floats16 values) {
  return reduced(values, [](auto a, auto b) { return a > b ? a : b; });
}

inline float sum(Floats16 values) {
  return reduced(values, [](auto a, auto b) { return a + b; });
}

// e^x within 2 units of the last place for x <= 88, 0 below -87 (the polynomial of Cephes' expf, S.
// Moshier); NaN stays NaN. Of vectors of any width.
template <class Floats>
Floats exp(Floats x) {
  using Ints = decltype(x < x);
  constexpr float kLowest = -87.0f, kRound = 0x1.8p23f;
  const Floats clamped = x < kLowest ? Floats{} + kLowest : x;
  const Floats shifted =
      clamped * 0x1.715476p+0f + kRound;  // its low bits are the nearest integer to x / ln 2
  const Floats power = shifted - kRound;
  const Floats r = clamped - power * 0x1.62e4p-1f - power * 0x1.7f7d1cp-20f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const Floats scaled = (Floats)((Ints)p + ((Ints)shifted << 23));
  return x < kLowest ? Floats{} : (x == x ? scaled : x);
}

inline Floats16 tanh(Floats16 x) {  // of |x| = 1 - 2 / (e^2|x| + 1), and the sign of x
  const Floats16 magnitude = x < 0.0f ? -x : x;
  const Floats16 limited = magnitude > 20.0f ? Floats16{} + 20.0f : magnitude;  // 1 in FLOAT
  const Floats16 value = 1.0f - 2.0f / (exp(limited * 2.0f) + 1.0f);
  return x < 0.0f ? -value : value;
}

}  // namespace
}  // namespace dflash
