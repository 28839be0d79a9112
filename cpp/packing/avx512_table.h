// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include "packing/vector_kernels.h"

// FP8 from BF16 by table, 64 weights at a time: three times as fast as dividing.
//
// A bfloat16 has 128 significands. Dividing by one scale, rounding the quotient to bfloat16 and
// then to e4m3 treats a significand alike at every exponent, as long as quotient and code are
// normal. So for a weight with exponent field e and significand field m
//
//   code(e, m) = code(e0, m) + 8 (e - e0)
//
// where 8 is one exponent of e4m3. The table holds code(e0, m) less what weight >> 4 contributes,
// in arithmetic modulo 256. Vectors with a quotient that is subnormal, 0 or saturates are divided.
namespace dflash {
namespace {

struct Bf16Table {
  __m512i low, high;         // by significand, 0-63 and 64-127
  __m512i smallest, extent;  // in words: the |w| that the table serves are smallest + [0, extent]
};

// `scale` is in [2^-119, 2^113].
Bf16Table bf16_table(float scale) {
  uint32_t scale_bits;
  __builtin_memcpy(&scale_bits, &scale, sizeof scale);
  const uint32_t exponent = (scale_bits >> 23) + 1;  // these quotients are in (1, 4)
  uint16_t weights[128];
  uint8_t table[128];
  for (uint32_t m = 0; m < 128; ++m) weights[m] = exponent << 7 | m;
  scalar_kernels(WeightType::kBf16).fp8((const std::byte*)weights, 128, scale, table);
  for (uint32_t m = 0; m < 128; ++m) table[m] -= weights[m] >> 4;

  const float largest = 448.0f * scale;
  uint32_t largest_bits;
  __builtin_memcpy(&largest_bits, &largest, sizeof largest);
  const int smallest = (scale_bits >> 16) + 1 - (6 << 7);  // above 2^-6 scale
  return {.low = _mm512_loadu_si512(table),
          .high = _mm512_loadu_si512(table + 64),
          .smallest = _mm512_set1_epi16(smallest),
          .extent = _mm512_set1_epi16((largest_bits >> 16) - smallest)};
}

// Packs 64 weights, of which the table must serve all.
void pack_by_table(const Bf16Table& table, __m512i first, __m512i second, uint8_t* out) {
  alignas(64) static constexpr auto kEven = [] {
    struct { uint8_t bytes[64]; } even{};
    for (int i = 0; i < 64; ++i) even.bytes[i] = 2 * i;
    return even;
  }();
  const __m512i even = _mm512_load_si512(&kEven);
  const __m512i odd = even | _mm512_set1_epi8(1);
  const __m512i low = _mm512_permutex2var_epi8(first, even, second);  // m in 7 bits; bit 7 unused
  const __m512i sign = _mm512_permutex2var_epi8(first, odd, second) & _mm512_set1_epi8(-128);
  const __m512i shifted = _mm512_permutex2var_epi8(_mm512_srli_epi16(first, 4), even,
                                                   _mm512_srli_epi16(second, 4));
  const __m512i entry = _mm512_permutex2var_epi8(table.low, low, table.high);
  _mm512_storeu_si512(out, _mm512_add_epi8(shifted, entry) | sign);
}

template <class V>
uint32_t fp8_bf16_by_table(const std::byte* weights, int64_t count, float scale, uint8_t* out) {
  constexpr int64_t kStep = 64;
  constexpr auto kBf16 = WeightType::kBf16;
  if (count < kStep || scale < 0x1p-119f || scale > 0x1p113f) {
    return fp8<V, kBf16>(weights, count, scale, out);
  }
  const Bf16Table table = bf16_table(scale);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest_words = _mm512_setzero_si512();
  I<V> largest = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const __m512i first = _mm512_loadu_si512(weights + 2 * i);
    const __m512i second = _mm512_loadu_si512(weights + 2 * i + 64);
    const __m512i low = _mm512_min_epu16(first & magnitude, second & magnitude);
    const __m512i high = _mm512_max_epu16(first & magnitude, second & magnitude);
    const __m512i above = _mm512_max_epu16(_mm512_sub_epi16(low, table.smallest),
                                           _mm512_sub_epi16(high, table.smallest));
    if (_mm512_cmpgt_epu16_mask(above, table.extent) == 0) {
      largest_words = _mm512_max_epu16(largest_words, high);
      pack_by_table(table, first, second, out + i);
    } else {
      for (int64_t j = i; j < i + kStep; j += V::kLanes) {
        largest = V::max(largest, fp8_vector<V, kBf16>(weights + 2 * j, scale, out + j));
      }
    }
  }
  largest = V::max(largest, (I<V>)_mm512_slli_epi32(largest_words, 16));
  largest = V::max(largest, (I<V>)largest_words & int32_t(0xffff0000));
  const uint32_t rest = fp8<V, kBf16>(weights + 2 * i, count - i, scale, out + i);
  const uint32_t main = largest_lane<V>(largest);
  return rest > main ? rest : main;
}

}  // namespace
}  // namespace dflash
