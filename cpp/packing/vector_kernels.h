// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "packing/kernels.h"

// The formulas of pack.h on vectors of V::kLanes floats. Each including file is compiled for its
// own instruction set, so everything here has internal linkage: a linker that kept one copy of a
// function for all of them could put AVX-512 instructions where the scalar path needs them not.
//
// V has the vector types F (float) and I (int32_t) with the operators of GCC and Clang, and what
// these operators cannot say: loads that widen, stores that narrow, max, min. min(a, b) is
// a < b ? a : b, thus b where a is NaN.
namespace dflash {
namespace {

template <class V>
using F = typename V::F;
template <class V>
using I = typename V::I;

template <class V>
I<V> abs_bits(F<V> value) {
  return (I<V>)value & kAbsMask;
}

template <class V>
uint32_t largest_lane(I<V> values) {
  uint32_t largest = 0;
  for (int lane = 0; lane < V::kLanes; ++lane) {
    const uint32_t value = values[lane];
    if (value > largest) largest = value;
  }
  return largest;
}

template <class V>
I<V> exponent_bits(F<V> value) {
  return (I<V>)value & int32_t{kInfinityBits};
}

// value >= 0 with kFraction fraction bits, given its exponent bits; scalar.cpp explains the sum.
template <class V, int kFraction>
F<V> round_fraction(F<V> value, I<V> exponent) {
  const F<V> large = (F<V>)(exponent + ((23 - kFraction) << 23));
  return (value + large) - large;
}

// e4m3(value) or e2m1(value) in the low bits of each lane; the bits above are arbitrary.
//
// The exponent is that of value or, where rounding carried value to a power of two, one less. The
// sum's low bits count steps of the grid, plus kBias, which is even and so leaves ties as they are;
// the exponent's own bits, shifted, supply the steps below it.
template <class V, int kFraction, int kMinExponent>
I<V> code_in_low_bits(F<V> value, I<V> exponent) {
  constexpr int32_t kLeast = (127 + kMinExponent) << 23;
  constexpr int32_t kBias = -(kLeast >> (23 - kFraction)) & 0xff;
  static_assert(kBias % 2 == 0);
  exponent = V::max(exponent, I<V>{} + kLeast);
  const F<V> large = (F<V>)(exponent + (((23 - kFraction) << 23) + kBias));
  return (I<V>)(value + large) + (exponent >> (23 - kFraction));
}

// float32 quotients as the weights' type holds them. What is subnormal there is 0 in e4m3, however
// it is rounded.
template <class V, WeightType kType>
F<V> round_to_type(F<V> value, I<V> exponent) {
  if constexpr (kType == WeightType::kBf16) return round_fraction<V, 7>(value, exponent);
  if constexpr (kType == WeightType::kF16) return round_fraction<V, 10>(value, exponent);
  return value;
}

template <class V, WeightType kType>
uint32_t amax(const std::byte* weights, int64_t count) {
  constexpr int64_t kStep = 4 * V::kLanes;
  I<V> largest[4] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (int64_t j = 0; j < 4; ++j) {
      const auto* at = weights + (i + j * V::kLanes) * bytes_of(kType);
      largest[j] = V::max(largest[j], abs_bits<V>(V::template load<kType>(at)));
    }
  }
  const uint32_t rest = scalar_kernels(kType).amax(weights + i * bytes_of(kType), count - i);
  const uint32_t main = largest_lane<V>(
      V::max(V::max(largest[0], largest[1]), V::max(largest[2], largest[3])));
  return rest > main ? rest : main;
}

// Packs one vector; returns its |w| as bits.
template <class V, WeightType kType>
I<V> fp8_vector(const std::byte* weights, float scale, uint8_t* out) {
  const F<V> weight = V::template load<kType>(weights);
  const I<V> magnitude = abs_bits<V>(weight);
  const F<V> quotient = V::min((F<V>)magnitude / scale, F<V>{} + 448.0f);
  const I<V> exponent = exponent_bits<V>(quotient);
  const F<V> rounded = round_to_type<V, kType>(quotient, exponent);
  const I<V> code = code_in_low_bits<V, 3, -6>(rounded, exponent);
  V::store_bytes(out, code | ((I<V>)weight >> 24 & 0x80));
  return magnitude;
}

template <class V, WeightType kType>
uint32_t fp8(const std::byte* weights, int64_t count, float scale, uint8_t* out) {
  I<V> largest = {};
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    const auto* at = weights + i * bytes_of(kType);
    largest = V::max(largest, fp8_vector<V, kType>(at, scale, out + i));
  }
  const uint32_t rest =
      scalar_kernels(kType).fp8(weights + i * bytes_of(kType), count - i, scale, out + i);
  const uint32_t main = largest_lane<V>(largest);
  return rest > main ? rest : main;
}

// e4m3 scales of V::kLanes blocks and what their weights are divided by; returns block_amax's bits.
template <class V>
I<V> block_scales(const float* block_amax, float scale_2, uint8_t* scales, float* divisors) {
  const F<V> amax = V::template load<WeightType::kF32>((const std::byte*)block_amax);
  F<V> scale = amax / (6.0f * scale_2);
  scale = scale == 0.0f ? F<V>{} + 1.0f : scale;
  scale = V::min(V::max(scale, F<V>{} + 0x1p-9f), F<V>{} + 448.0f);
  const I<V> exponent = exponent_bits<V>(scale);
  V::store_bytes(scales, code_in_low_bits<V, 3, -6>(scale, exponent));
  const I<V> spacing = V::max(exponent, I<V>{} + (121 << 23));  // subnormals are spaced as at 2^-6
  V::store_floats(divisors, round_fraction<V, 3>(scale, spacing) * scale_2);
  return (I<V>)amax;
}

template <class V, WeightType kType>
void block_codes(const std::byte* weights, float divisor, uint8_t* data) {
  I<V> codes[kBlock / V::kLanes];
  for (int64_t i = 0; i < kBlock / V::kLanes; ++i) {
    const auto* at = weights + i * V::kLanes * bytes_of(kType);
    const F<V> quotient = V::template load<kType>(at) / divisor;
    const F<V> magnitude = V::min((F<V>)abs_bits<V>(quotient), F<V>{} + 6.0f);
    const I<V> code = code_in_low_bits<V, 1, 0>(magnitude, exponent_bits<V>(magnitude));
    codes[i] = code | (I<V>(quotient < 0.0f) & 8);
  }
  V::store_nibbles(data, codes);
}

template <class V, WeightType kType>
uint32_t nvfp4(const std::byte* weights, int64_t num_blocks, float scale_2, uint8_t* data,
               uint8_t* scales) {
  constexpr int64_t kBlockBytes = kBlock * bytes_of(kType);
  constexpr int64_t kChunk = 8 * kBlock;  // so many that waiting for the first scale costs little
  I<V> largest = {};
  alignas(64) float block_amax[kChunk];
  alignas(64) float divisors[kChunk];
  int64_t block = 0;
  while (block + kBlock <= num_blocks) {  // kBlock blocks have a whole number of vectors of scales
    const int64_t left = (num_blocks - block) / kBlock * kBlock;
    const int64_t chunk = left < kChunk ? left : kChunk;
    const std::byte* first = weights + block * kBlockBytes;
    for (int64_t i = 0; i < chunk; ++i) {
      block_amax[i] = V::template block_amax<kType>(first + i * kBlockBytes);
    }
    for (int64_t i = 0; i < chunk; i += V::kLanes) {
      const I<V> amax = block_scales<V>(block_amax + i, scale_2, scales + block + i, divisors + i);
      largest = V::max(largest, amax);
    }
    for (int64_t i = 0; i < chunk; ++i) {
      block_codes<V, kType>(first + i * kBlockBytes, divisors[i], data + (block + i) * kBlock / 2);
    }
    block += chunk;
  }
  const uint32_t rest =
      scalar_kernels(kType).nvfp4(weights + block * kBlockBytes, num_blocks - block, scale_2,
                                  data + block * kBlock / 2, scales + block);
  const uint32_t main = largest_lane<V>(largest);
  return rest > main ? rest : main;
}

template <class V>
Kernels vector_kernels(WeightType type) {
  constexpr auto kBf16 = WeightType::kBf16, kF16 = WeightType::kF16, kF32 = WeightType::kF32;
  if (type == kBf16) {
    return {.amax = amax<V, kBf16>, .fp8 = fp8<V, kBf16>, .nvfp4 = nvfp4<V, kBf16>};
  }
  if (type == kF16) return {.amax = amax<V, kF16>, .fp8 = fp8<V, kF16>, .nvfp4 = nvfp4<V, kF16>};
  return {.amax = amax<V, kF32>, .fp8 = fp8<V, kF32>, .nvfp4 = nvfp4<V, kF32>};
}

}  // namespace
}  // namespace dflash
