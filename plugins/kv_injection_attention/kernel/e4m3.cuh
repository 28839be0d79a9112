// SPDX-License-Identifier: Apache-2.0
// Conversion to E4M3 in software, for GPUs before kFirstFp8.
#pragma once

#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// Converts one number to E4M3, rounding to nearest even and saturating at 448; NaN stays NaN.
DFLASH_DEVICE uint32_t e4m3_by_bits(float x) {
  constexpr uint32_t kNaN = 0x7f, kRebias = (127 - 7) << 3;
  // Subnormal numbers are multiples of 2^-9, the unit in the last place of 2^14.
  constexpr float kLeastNormal = 0x1p-6f, kLargest = 448, kUnitIsSubnormal = 0x1p14f;
  const uint32_t sign = as_bits(x) >> 24 & 0x80;
  const float size = fminf(fabsf(x), kLargest);
  const uint32_t bits = as_bits(size);
  const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - kRebias;
  const uint32_t subnormal = as_bits(size + kUnitIsSubnormal) - as_bits(kUnitIsSubnormal);
  const uint32_t code = size < kLeastNormal ? subnormal : normal;
  return x == x ? sign | code : kNaN;
}

// Converts two numbers; the first goes to the low byte.
DFLASH_DEVICE uint32_t to_e4m3x2(float first, float second) {
  if constexpr (kArchitecture >= kFirstFp8) {
    return cvt_e4m3x2(first, second);
  } else {
    return e4m3_by_bits(second) << 8 | e4m3_by_bits(first);
  }
}

}  // namespace dflash::kv_injection
