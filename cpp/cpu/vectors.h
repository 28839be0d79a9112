// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

// Float vectors by GCC's and Clang's vector extensions, as wide as the registers of the instruction set for which the
// including file is compiled (GCC splits wider ones through memory). Everything therefore has internal linkage and uses
// no standard library function with code: the linker keeps one copy of a weak symbol, such as std::min<long>, for all
// instruction sets. Corresponds to torch's at::vec::Vectorized; exp() and tanh() to oneDNN's eltwise injectors.

namespace dflash {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

using Bf16 = uint16_t;  // bit pattern of a bfloat16

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

template <class Element>
void copy(const Element* from, int64_t count, Element* to) {
  std::memcpy(to, from, sizeof(Element) * count);
}

inline float to_float(float value) { return value; }
inline float to_float(Bf16 bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline Floats load(const float* at) {
  Floats values;
  std::memcpy(&values, at, sizeof values);
  return values;
}

inline Floats load(const Bf16* at) {
  Halves bits;
  std::memcpy(&bits, at, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(Floats values, float* out) { std::memcpy(out, &values, sizeof values); }

inline void store(Floats values, Bf16* out) {  // rounds to nearest even; NaN becomes quiet
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words words = values == values ? rounded : (bits >> 16 | 0x40);
  const Halves halves = __builtin_convertvector(words, Halves);
  std::memcpy(out, &halves, sizeof halves);
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// Reduces by halves.
template <class Combine>
float reduced(Floats values, Combine combine) {
  float lanes[kLanes];
  store(values, lanes);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lanes[i] = combine(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

inline float largest(Floats values) {
  return reduced(values, [](float a, float b) { return a > b ? a : b; });
}

inline float sum(Floats values) {
  return reduced(values, [](float a, float b) { return a + b; });
}

// e^x within 2 units of the last place for x <= 88, 0 below -87 (the polynomial of Cephes' expf,
// S. Moshier); NaN stays NaN.
inline Floats exp(Floats x) {
  constexpr float kLowest = -87.0f, kRound = 0x1.8p23f;
  const Floats bounded = x < kLowest ? Floats{} + kLowest : x;
  const Floats shifted = bounded * 0x1.715476p+0f + kRound;  // low bits: the nearest integer to x / ln 2
  const Floats power = shifted - kRound;
  const Floats r = bounded - power * 0x1.62e4p-1f - power * 0x1.7f7d1cp-20f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const Floats scaled = (Floats)((Ints)p + ((Ints)shifted << 23));
  return x < kLowest ? Floats{} : (x == x ? scaled : x);
}

inline Floats tanh(Floats x) {  // tanh |x| = 1 - 2 / (e^2|x| + 1), with the sign of x
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats limited = magnitude > 20.0f ? Floats{} + 20.0f : magnitude;  // 1 in FLOAT
  const Floats value = 1.0f - 2.0f / (exp(limited * 2.0f) + 1.0f);
  return x < 0.0f ? -value : value;
}

}  // namespace
}  // namespace dflash
