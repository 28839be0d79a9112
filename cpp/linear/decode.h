// SPDX-License-Identifier: Apache-2.0
// Decodes weights a vector at a time, with the same bits on every instruction set. It is compiled once per instruction
// set, so everything here has internal linkage.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstring>

#include "cpu/vectors.h"
#include "linear/linear.h"

namespace dflash {
namespace {

inline constexpr float kNaN = NAN;

inline Floats bfloat16(const uint8_t* codes) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)codes)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)codes)), 16);
#else
  return load((const Bf16*)codes);
#endif
}

inline Floats float16(const uint8_t* codes) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)codes));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)codes));
#else
  Halves bits;
  std::memcpy(&bits, codes, sizeof bits);
  const Words words = __builtin_convertvector(bits, Words);
  const Words sign = (words & 0x8000) << 16, rest = (words & 0x7fff) << 13;
  const Words finite = (Words)((Floats)rest * 0x1p112f);  // from this format's exponent bias to FLOAT's
  return (Floats)(sign | ((words & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : finite));
#endif
}

// e4m3 codes times `scale`: 1 sign bit, 4 exponent bits with bias 7, 3 significand bits; 0x7f and 0xff are NaN.
inline Floats e4m3(const uint8_t* codes, float scale) {
#if defined(__AVX512F__)
  // Moved into a FLOAT16, whose bias is 15, the bits are 2^-8 of the value.
  const __m128i bytes = _mm_loadu_si128((const __m128i*)codes);
  const __mmask16 number = _mm_cmpneq_epi8_mask(bytes | _mm_set1_epi8(-128), _mm_set1_epi8(-1));
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7) & _mm256_set1_epi16(int16_t(0xbf80));
  const __m512 nan = _mm512_set1_ps(kNaN), factor = _mm512_set1_ps(0x1p8f) * _mm512_set1_ps(scale);
  return (Floats)_mm512_mask_mul_ps(nan, number, _mm512_cvtph_ps(halves), factor);
#else
  Ints words;
#if defined(__AVX2__)
  words = (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
#else
  for (int64_t i = 0; i < kLanes; ++i) words[i] = codes[i];
#endif
  const Ints magnitude = words & 0x7f;
  const Floats subnormal = __builtin_convertvector(magnitude, Floats) * 0x1p-9f;
  const Floats normal = (Floats)((magnitude << 20) + (120 << 23));
  const Floats size = magnitude == 0x7f ? Floats{} + kNaN : (magnitude < 8 ? subnormal : normal);
  return (Floats)((Ints)size | (words & 0x80) << 24) * scale;
#endif
}

// e2m1 codes, two per byte, low nibble first: 1 sign bit, 2 exponent bits, 1 significand bit.
inline Floats e2m1(const uint8_t* codes) {
#if defined(__AVX512F__)
  const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)codes));
  // The lookup uses the lowest four bits of each 32-bit half: the low nibble, and the high nibble moved there.
  return (Floats)_mm512_permutexvar_ps(bytes | _mm512_slli_epi64(bytes, 28), values);
#else
  Ints words;
#if defined(__AVX2__)
  int32_t bytes;
  std::memcpy(&bytes, codes, sizeof bytes);
  words = (Ints)_mm256_srlv_epi32(_mm256_set1_epi32(bytes), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
#else
  for (int64_t i = 0; i < kLanes; ++i) words[i] = codes[i / 2] >> (i % 2 * 4);
#endif
  const Ints magnitude = words & 7;
  const Floats small = __builtin_convertvector(magnitude, Floats) * 0.5f;
  const Floats large = (Floats)((magnitude << 22) + (126 << 23));
  return (Floats)((Ints)(magnitude < 2 ? small : large) | (words & 8) << 28);
#endif
}

// kLanes codes of a row from the k-th on, stored at `codes` in kBytes.
struct FloatRow {
  static constexpr int64_t kBytes = 4 * kLanes;
  Floats operator()(const uint8_t* codes, int64_t) const { return load((const float*)codes); }
};
struct Float16Row {
  static constexpr int64_t kBytes = 2 * kLanes;
  Floats operator()(const uint8_t* codes, int64_t) const { return float16(codes); }
};
struct Bfloat16Row {
  static constexpr int64_t kBytes = 2 * kLanes;
  Floats operator()(const uint8_t* codes, int64_t) const { return bfloat16(codes); }
};
struct Fp8Row {
  static constexpr int64_t kBytes = kLanes;
  float scale;
  Floats operator()(const uint8_t* codes, int64_t) const { return e4m3(codes, scale); }
};
struct Nvfp4Row {
  static constexpr int64_t kBytes = kLanes / 2;
  const float* block_scales;  // [K / 16]
  Floats operator()(const uint8_t* codes, int64_t k) const { return e2m1(codes) * block_scales[k / 16]; }
};

struct Int4Row {
  static constexpr int64_t kBytes = kLanes;
  const uint8_t* scales;  // [K / 32], float
  int shift;              // 0 for the first row of a pair, 4 for the second
  Floats operator()(const uint8_t* codes, int64_t k) const {
    Ints words;
#if defined(__AVX512F__)
    words = (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
#elif defined(__AVX2__)
    words = (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
#else
    for (int64_t i = 0; i < kLanes; ++i) words[i] = codes[i];
#endif
    uint32_t scale_bits;
    std::memcpy(&scale_bits, scales + k / 32 * 4, sizeof scale_bits);
    scale_bits += 0x7fff + (scale_bits >> 16 & 1);  // rounded to bfloat16, in which TensorRT reads it
    const float scale = to_float(Bf16(scale_bits >> 16));
    const Ints values = ((words >> shift & 15) ^ 8) - 8;  // two's complement
    return __builtin_convertvector(values, Floats) * scale;
  }
};

// Codes of a row and of the row that shares its bytes.
inline const uint8_t* row_codes(const PackedWeight& weight, int64_t row) {
  return weight.codes + (weight.format == WeightFormat::kInt4 ? row / 2 : row) * row_bytes(weight.format, weight.cols);
}

// A row's K numbers, padded with zeros to whole vectors.
template <class Row>
void decode_row(const uint8_t* codes, int64_t K, Row decode, float* out) {
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes, codes += Row::kBytes) store(decode(codes, k), out + k);
  if (k == K) return;
  uint8_t rest[Row::kBytes] = {};
  std::memcpy(rest, codes, (K - k) * Row::kBytes / kLanes);
  store(decode(rest, k), out + k);
}

// A row's block scales [K / 16] times their scale.
inline void decode_block_scales(const PackedWeight& weight, int64_t row, float* out) {
  const int64_t count = weight.cols / 16;
  decode_row(weight.block_scales + row * count, count, Fp8Row{weight.scale}, out);
}

}  // namespace
}  // namespace dflash
