// SPDX-License-Identifier: Apache-2.0
// x times the transpose of a weight that stays as its file holds it: FLOAT, FLOAT16, BFLOAT16, FP8, NVFP4 or INT4. What
// its codes mean stands in registers alone. In oneDNN: matmul with weights decompression, of weights in a plain layout.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace dflash {

enum class WeightFormat { kFloat, kFloat16, kBfloat16, kFp8, kNvfp4, kInt4 };

struct PackedWeight {
  WeightFormat format;
  int64_t rows;                 // N; of INT4 a multiple of 2
  int64_t cols;                 // K; of NVFP4 a multiple of 16, of INT4 one of 32
  const uint8_t* codes;         // [N, row_bytes], at any alignment; INT4: [N / 2, K], low nibble of the first row
  const uint8_t* block_scales;  // NVFP4: [N, K / 16], e4m3; INT4: [N, K / 32], float, at any alignment
  float scale;                  // FP8: of all codes; NVFP4: of all block scales
};

// Bytes of a row of `cols` codes; of INT4 a pair of rows shares them.
int64_t row_bytes(WeightFormat format, int64_t cols);

struct Linear {
  PackedWeight weight;
  int64_t num_rows;    // M
  const float* x;      // [M, K]
  float* out;          // [M, N]
  int64_t out_stride;  // from one row of it to the next
};

// Computes columns [begin, end) of out, at most kColumnsAtATime. Each number depends on its row of x, its row of the
// weight and the instruction set alone.
using MultiplyColumns = void (*)(const Linear& linear, int64_t begin, int64_t end);
MultiplyColumns multiply_columns(Isa isa);

inline constexpr int64_t kColumnsAtATime = 24;  // whole tiles, whose codes a core's second cache holds

void multiply_columns_avx512(const Linear& linear, int64_t begin, int64_t end);
void multiply_columns_avx2(const Linear& linear, int64_t begin, int64_t end);
void multiply_columns_scalar(const Linear& linear, int64_t begin, int64_t end);

}  // namespace dflash
