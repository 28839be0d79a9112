// SPDX-License-Identifier: Apache-2.0
#include "packing/vector_kernels.h"
#include "packing/x86_block.h"

namespace dflash {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  using F = __m256;
  typedef int32_t I __attribute__((vector_size(32)));

  template <WeightType kType>
  static F load(const std::byte* at) {
    if constexpr (kType == WeightType::kF32) return _mm256_loadu_ps((const float*)at);
    const __m128i weights = _mm_loadu_si128((const __m128i*)at);
    if constexpr (kType == WeightType::kF16) return _mm256_cvtph_ps(weights);
    return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(weights), 16);
  }

  template <WeightType kType>
  static float block_amax(const std::byte* block) {
    return block_amax_x86<kType>(block);
  }

  static I max(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }

  static void store_floats(float* out, F values) { _mm256_storeu_ps(out, values); }

  static void store_bytes(uint8_t* out, I codes) {
    const __m256i all = (__m256i)(codes & 0xff);
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64((__m128i*)out, _mm_packus_epi16(words, words));
  }

  static void store_nibbles(uint8_t* out, const I (&codes)[2]) {
    // Words: codes 0-3, 8-11 | 4-7, 12-15; then even + 16 * odd in 32-bit lanes.
    const __m256i words = _mm256_packus_epi32((__m256i)(codes[0] & 15), (__m256i)(codes[1] & 15));
    const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi32(16 << 16 | 1));
    // Byte pairs in 16-bit lanes: 01 23 89 ab 45 67 cd ef; the shuffle sorts and narrows them.
    const __m128i bytes =
        _mm_packus_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i order = _mm_setr_epi8(0, 2, 8, 10, 4, 6, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1);
    _mm_storel_epi64((__m128i*)out, _mm_shuffle_epi8(bytes, order));
  }
};

}  // namespace

Kernels avx2_kernels(WeightType type) { return vector_kernels<Avx2>(type); }

}  // namespace dflash
