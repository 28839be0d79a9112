// SPDX-License-Identifier: Apache-2.0
// Rounds FLOAT to BF16. It is compiled for several instruction sets, so everything here has internal linkage.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/vectors.h"

namespace dflash {
namespace {

// Bits of the nearest BF16 number, ties to even; NaN becomes quiet.
inline uint16_t rounded(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Stores sums [count] plus a bias, which may be null, rounded once.
inline void round_row(const float* sums, const uint16_t* bias, int64_t count, uint16_t* out) {
  for (int64_t n = 0; n < count; ++n) out[n] = rounded(bias ? sums[n] + to_float(bias[n]) : sums[n]);
}

}  // namespace
}  // namespace dflash
