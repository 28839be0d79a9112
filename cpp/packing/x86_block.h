// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include "packing/weights.h"

// What AVX2 and AVX-512 have in common; internal linkage for the reason in vector_kernels.h.
namespace dflash {
namespace {

inline __m256i load_256(const std::byte* at) { return _mm256_loadu_si256((const __m256i*)at); }

// max |w| over one NVFP4 block; NaN counts as larger than infinity.
template <WeightType kType>
float block_amax_x86(const std::byte* block) {
  if constexpr (kType == WeightType::kF32) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    const __m256i max8 = _mm256_max_epu32(_mm256_and_si256(load_256(block), mask),
                                          _mm256_and_si256(load_256(block + 32), mask));
    __m128i max4 = _mm_max_epu32(_mm256_castsi256_si128(max8), _mm256_extracti128_si256(max8, 1));
    max4 = _mm_max_epu32(max4, _mm_shuffle_epi32(max4, _MM_SHUFFLE(1, 0, 3, 2)));
    max4 = _mm_max_epu32(max4, _mm_shuffle_epi32(max4, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtss_f32(_mm_castsi128_ps(max4));
  } else {
    const __m256i magnitude = _mm256_and_si256(load_256(block), _mm256_set1_epi16(0x7fff));
    const __m128i max8 = _mm_max_epu16(_mm256_castsi256_si128(magnitude),
                                       _mm256_extracti128_si256(magnitude, 1));
    // minpos is the only horizontal instruction, so take the minimum of 0x7fff - max.
    const __m128i top = _mm_set1_epi16(0x7fff);
    const __m128i max1 = _mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(max8, top)), top);
    if constexpr (kType == WeightType::kF16) return _mm_cvtss_f32(_mm_cvtph_ps(max1));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_slli_epi32(max1, 16)));
  }
}

}  // namespace
}  // namespace dflash
