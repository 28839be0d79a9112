// SPDX-License-Identifier: Apache-2.0
// Computes 2^x by multiply-adds, for kernels that are bound by the exponential unit, as FlashAttention-4 does on
// Blackwell (flash_attn/cute/utils.py, ex2_emulation). Eight instructions instead of one.
#pragma once

#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// Valid for x from -126 to 9; 512 above, which exceeds kMaxWeight, less than 2^-126 below, and 0 up to -127. NaN gives
// 0.
//
// x = n + f with n an integer and |f| <= 1/2: 2^f is a polynomial of degree 3, 2^n goes into the exponent. The relative
// error is at most 1.1e-4 (2^-13.1), a quarter of what rounding to FP16 may add; the exponential unit's is 2^-22.
DFLASH_DEVICE float exp2_by_polynomial(float x) {
  constexpr float kRange = 136, kLeast = -127;
  const float part = fma_rn_sat(x, 1 / kRange, -kLeast / kRange);
  // kWhole has a unit of 1 in the last place, so that the sum's lowest bits are n.
  constexpr float kWhole = 12582912 + kLeast;  // 1.5 * 2^23
  const float rounded = fma_rn(part, kRange, kWhole);
  const float f = fma_rn(part, kRange, kWhole - rounded);
  float power = fma_rn(f, 0.0550088659f, 0.242210969f);
  power = fma_rn(f, power, 0.693282962f);
  power = fma_rn(f, power, 1.0f);
  return as_float((as_bits(rounded) << 23) + as_bits(power));
}

}  // namespace dflash::kv_injection
