// SPDX-License-Identifier: Apache-2.0
// x times the transpose of a weight in its storage format: FLOAT, FLOAT16, BFLOAT16, FP8, NVFP4 or INT4. Codes are
// decoded in registers only. Corresponds to oneDNN's matmul with weights decompression, for weights in a plain layout.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace dflash {

enum class WeightFormat { kFloat, kFloat16, kBfloat16, kFp8, kNvfp4, kInt4 };

struct PackedWeight {
  WeightFormat format;
  int64_t rows;                 // N; for INT4 a multiple of 2
  int64_t cols;                 // K; for NVFP4 a multiple of 16, for INT4 of 32
  const uint8_t* codes;         // [N, row_bytes], at any alignment; INT4: [N / 2, K], low nibble of the first row
  const uint8_t* block_scales;  // NVFP4: [N, K / 16], e4m3; INT4: [N, K / 32], float, at any alignment
  float scale;                  // FP8: scale of all codes; NVFP4: scale of all block scales
};

// Bytes of a row of `cols` codes; with INT4, a pair of rows shares them.
int64_t row_bytes(WeightFormat format, int64_t cols);

struct Linear {
  PackedWeight weight;
  int64_t num_rows;    // M
  const float* x;      // [M, K]
  float* out;          // [M, N]
  int64_t out_stride;  // stride of its rows
};

// Computes columns [begin, end) of out, at most kColumnsAtATime. Each number depends only on its row of x, its row of
// the weight and the instruction set.
using MultiplyColumns = void (*)(const Linear& linear, int64_t begin, int64_t end);
MultiplyColumns multiply_columns(Isa isa);

inline constexpr int64_t kColumnsAtATime = 24;  // whole tiles whose codes fit into a core's L2 cache

void multiply_columns_avx512(const Linear& linear, int64_t begin, int64_t end);
void multiply_columns_avx2(const Linear& linear, int64_t begin, int64_t end);
void multiply_columns_scalar(const Linear& linear, int64_t begin, int64_t end);

}  // namespace dflash
