// SPDX-License-Identifier: Apache-2.0
// A linear layer of a BF16 target: products are summed in FLOAT, and the sum with its bias is rounded once.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/parallel.h"

namespace dflash {

struct Bfloat16Linear {
  int64_t num_rows;        // M
  int64_t num_inputs;      // K
  int64_t num_outputs;     // N
  const uint16_t* x;       // [M, K]
  const uint16_t* weight;  // [N, K]
  const uint16_t* bias;    // [N], or null
  uint16_t* out;           // [M, N]
};

// Computes layers of this shape whose operands are contiguous, starting with `first`; counts[e] is the M of layer e. A
// row's bits depend only on that row and the instruction set, not on other rows or the number of threads. `isa` is
// "best", "avx512bf16" or one of usable_isas(). Throws std::invalid_argument if the CPU lacks it.
void linear(const Bfloat16Linear& first, const std::vector<int64_t>& counts, const Threads& threads,
            std::string_view isa);

// Computes columns [begin, end) of out by the dot products of AVX512-BF16.
void bfloat16_products(const Bfloat16Linear& layer, int64_t begin, int64_t end);

}  // namespace dflash
