// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "packing/weights.h"

namespace dflash {

// A matrix of bytes that stays as it is.
struct ConstBytes {
  const uint8_t* data;  // [rows, cols]
  int64_t rows;
  int64_t cols;
};

// A matrix of FLOAT that is filled.
struct Floats {
  float* data;  // [rows, cols]
  int64_t rows;
  int64_t cols;
};

// out[r, k] = e4m3(codes[r, k]) * scale in float32; `threads` 0 is as many as the hardware runs.
// Throws std::invalid_argument for another shape.
void unpack_fp8(ConstBytes codes, float scale, Floats out, int threads);

// out[r, k] = e2m1(code[r, k]) * (e4m3(scales[r, k / 16]) * scale_2), each product in float32.
// data is [R, K / 2], low nibble first, scales [R, K / 16]. Throws std::invalid_argument for another shape.
void unpack_nvfp4(ConstBytes data, ConstBytes scales, float scale_2, Floats out, int threads);

}  // namespace dflash
