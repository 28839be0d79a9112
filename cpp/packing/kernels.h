// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/isa.h"
#include "packing/weights.h"

namespace dflash {

// What runs over a contiguous range, for one weight type and one instruction set. pack.h has the
// formulas. Each returns max |w| as float32 bits: NaN and infinity are its largest values, so the
// caller need not look at the weights again to know that all were finite.
struct Kernels {
  uint32_t (*amax)(const std::byte* weights, int64_t count);
  uint32_t (*fp8)(const std::byte* weights, int64_t count, float scale, uint8_t* out);
  uint32_t (*nvfp4)(const std::byte* weights, int64_t num_blocks, float scale_2, uint8_t* data,
                    uint8_t* scales);
};

inline constexpr uint32_t kInfinityBits = 0x7f800000;
inline constexpr uint32_t kAbsMask = 0x7fffffff;

Kernels scalar_kernels(WeightType type);
Kernels avx2_kernels(WeightType type);
Kernels avx512_kernels(WeightType type);

}  // namespace dflash
