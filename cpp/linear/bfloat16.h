// SPDX-License-Identifier: Apache-2.0
// A linear layer of a target in BF16: products add up in FLOAT, and sum and bias are rounded once.
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

// Layers of this shape, the first of them `first`, whose operands lie end to end; counts[e] is the M of one of them.
// A row's numbers depend on that row alone, to the last bit: neither on the other rows nor on the number of threads.
// They do on the instruction set: "best" of the CPU's, "avx512bf16", or one of usable_isas(). Throws
// std::invalid_argument for one that the CPU lacks.
void linear(const Bfloat16Linear& first, const std::vector<int64_t>& counts, const Threads& threads,
            std::string_view isa);

// Columns [begin, end) of out, by the dot products of AVX512-BF16.
void bfloat16_products(const Bfloat16Linear& layer, int64_t begin, int64_t end);

}  // namespace dflash
