// SPDX-License-Identifier: Apache-2.0
#include "packing/avx512_table.h"
#include "packing/vector_kernels.h"
#include "packing/x86_block.h"

namespace dflash {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  using F = __m512;
  typedef int32_t I __attribute__((vector_size(64)));

  template <WeightType kType>
  static F load(const std::byte* at) {
    if constexpr (kType == WeightType::kF32) return _mm512_loadu_ps(at);
    if constexpr (kType == WeightType::kF16) return _mm512_cvtph_ps(load_256(at));
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(at)), 16);
  }

  template <WeightType kType>
  static float block_amax(const std::byte* block) {
    return block_amax_x86<kType>(block);
  }

  static I max(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }

  static void store_floats(float* out, F values) { _mm512_storeu_ps(out, values); }

  static void store_bytes(uint8_t* out, I codes) {
    _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8((__m512i)codes));
  }

  static void store_nibbles(uint8_t* out, const I (&codes)[1]) {
    // A 64-bit lane has an even code in its low half and the odd one after it in its high half.
    const __m512i pairs = (__m512i)codes[0];
    const __m512i odd = _mm512_srli_epi64(pairs, 28);
    const __m512i bytes = (pairs & _mm512_set1_epi64(0x0f)) | (odd & _mm512_set1_epi64(0xf0));
    _mm_storel_epi64((__m128i*)out, _mm512_cvtepi64_epi8(bytes));
  }
};

}  // namespace

Kernels avx512_kernels(WeightType type) {
  Kernels kernels = vector_kernels<Avx512>(type);
  if (type == WeightType::kBf16) kernels.fp8 = fp8_bf16_by_table<Avx512>;
  return kernels;
}

}  // namespace dflash
