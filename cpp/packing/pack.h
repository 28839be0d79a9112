// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

#include "packing/weights.h"

namespace dflash {

// A weight is NaN or infinite; the message has its index. The caller adds the tensor's name.
struct NonFiniteError : std::domain_error {
  using std::domain_error::domain_error;
};

// In oneDNN's terms, the packers are reorders to f8_e4m3 and f4_e2m1 with scales per tensor or per group of 16.
// `threads` is 0 for the number of hardware threads; the bytes do not depend on it.

// max |w|, 0 for an empty tensor. Throws NonFiniteError.
float amax(const Weights& weights, int threads);

// out[r, k] = e4m3(T(w[r, k] / scale)), where T is the weights' type: modelopt 0.47 divides in float32 and rounds the
// quotient to T first (export/quant_utils.py:881). Every rounding is to nearest even; beyond +-448 saturates.
//
// out is [R, K]. Throws std::invalid_argument for another shape or a scale that is not positive and finite, and
// NonFiniteError, after which the contents of out are undefined.
void pack_fp8(const Weights& weights, float scale, Bytes out, int threads);

// Blocks of 16 along k; all arithmetic is in float32 (quantization/qtensor/nvfp4_tensor.py:170):
//
//   s[r, b] = max |w[r, 16 b .. 16 b + 15]| / (6 * scale_2);  s = 1 where that is 0
//   scales[r, b] = e4m3(clamp(s, 2^-9, 448))
//   code[r, k] = e2m1(w[r, k] / (scales[r, b] * scale_2)),  saturating at +-6
//   data[r, k / 2] = code[r, k] | code[r, k + 1] << 4  for even k
//
// Rounding is to nearest even. A quotient that is a zero of either sign has code 0.
//
// data is [R, K / 2], scales [R, K / 16]. Throws std::invalid_argument for another shape, K that
// 16 does not divide or a scale_2 that is not positive and finite; NonFiniteError.
void pack_nvfp4(const Weights& weights, float scale_2, Bytes data, Bytes scales, int threads);

// Blocks of 32 along k, two rows to a byte (export/quant_utils.py:805); all arithmetic is in float32:
//
//   s[r, b] = bfloat16(max |w[r, 32 b .. 32 b + 31]| / n),  1 where that is 0
//   code[r, k] = rint(w[r, k] / s[r, b]) in two's complement,  saturating at -8 and 7
//   data[r / 2, k] = code[r, k] | code[r + 1, k] << 4  for even r
//
// n is the first out of 7, 7.25, 7.5, 7.75 and 8 with the least sum of (w - code * s)^2. Rounding is to nearest even.
// modelopt's `max` has n = 7 and does not round s; TensorRT reads it in the activations' type.
//
// data is [R / 2, K], scales [R, K / 32]. Throws std::invalid_argument for another shape, R that 2
// or K that 32 does not divide; NonFiniteError.
void pack_int4(const Weights& weights, Bytes data, Scales scales, int threads);

}  // namespace dflash
