// SPDX-License-Identifier: Apache-2.0
// Loads rows in shared memory as operands of mma_m16n8k16(): queries on the left, keys and values on the right.
#pragma once

#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// A tile of 16 rows and 32 columns as two left operands.
DFLASH_DEVICE void load_left(uint32_t (&a)[2][4], Shared rows, int stride, int column, int lane) {
  const Shared row = rows + (lane % 16) * stride + column * 2 + (lane / 16) * 16;
  ldmatrix_x4(a[0], row);
  ldmatrix_x4(a[1], row + 32);
}

// 16 keys as right operands of scores: b[i][n] covers columns 16 i to 16 i + 15 of keys 8 n to 8 n + 7.
// `kFp8`: the rows are E4M3, and the columns are permuted as in Columns::kPairs.
template <bool kFp8, class Rows>
DFLASH_DEVICE void load_keys(uint32_t (&b)[2][2][2], Shared rows, int column, int lane) {
  uint32_t m[4];
  if constexpr (kFp8) {
    ldmatrix_x4(m, Rows::ahead(rows + Rows::at(lane % 16, lane / 16 * 16), column));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cvt_f16x2_e4m3x2(b[i / 2][i % 2][0], b[i / 2][i % 2][1], m[i]);
    }
  } else {
    const Shared row = Rows::ahead(rows + Rows::at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16), column * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ldmatrix_x4(m, row + i * 32);
#pragma unroll
      for (int j = 0; j < 4; ++j) b[i][j / 2][j % 2] = m[j];
    }
  }
}

// 16 values as right operands of outputs: b[n] covers columns 8 n to 8 n + 7 of the 32 from `column` on.
// `kFp8`: the rows are E4M3; for every 16 columns, the first operand has the even ones and the second the odd ones.
template <bool kFp8, class Rows>
DFLASH_DEVICE void load_values(uint32_t (&b)[4][2], Shared rows, int column, int lane) {
  uint32_t m[4];
  if constexpr (kFp8) {
    ldmatrix_x4_trans(m, Rows::ahead(rows + Rows::at(lane % 16, lane / 16 * 16), column));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Bytes: key 0 even, key 0 odd, key 1 even, key 1 odd.
      const uint32_t even_odd = prmt(m[i], 0, 0x3120);
      cvt_f16x2_e4m3x2(b[i / 2 * 2][i % 2], b[i / 2 * 2 + 1][i % 2], even_odd);
    }
  } else {
    const Shared row = Rows::ahead(rows + Rows::at(lane % 16, lane / 16 * 16), column * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ldmatrix_x4_trans(m, row + i * 32);
#pragma unroll
      for (int j = 0; j < 4; ++j) b[2 * i + j / 2][j % 2] = m[j];
    }
  }
}

}  // namespace dflash::kv_injection
