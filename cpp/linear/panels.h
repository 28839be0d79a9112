// SPDX-License-Identifier: Apache-2.0
// A linear layer in FLOAT whose weight is laid out so that a vector of it belongs to neighbouring columns of out.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/parallel.h"

namespace dflash {

inline constexpr int64_t kPanel = 16;         // such columns
inline constexpr int64_t kPanelsAtATime = 4;  // a thread's; then a tile has many sums

struct PanelLinear {
  int64_t num_rows;     // M
  int64_t num_inputs;   // K
  int64_t num_outputs;  // N
  const float* x;       // [M, K]
  const float* weight;  // [ceil(N / kPanel), K, kPanel]; what is behind column N is not used
  const float* bias;    // [N], or null
  float* out;           // [M, N]
};

// Layers of this shape, the first of them `first`, whose operands lie end to end; counts[e] is the M of one of them.
// A number is the sum of its products in the order of K, and then the bias, on any instruction set: it depends neither
// on other rows nor on the number of threads. `isa` is "best" or one of usable_isas(). Throws std::invalid_argument for
// one that the CPU lacks.
void linear(const PanelLinear& first, const std::vector<int64_t>& counts, const Threads& threads, std::string_view isa);

// Panels [begin, end) of out.
void multiply_panels_avx512(const PanelLinear& layer, int64_t begin, int64_t end);
void multiply_panels_avx2(const PanelLinear& layer, int64_t begin, int64_t end);
void multiply_panels_scalar(const PanelLinear& layer, int64_t begin, int64_t end);

}  // namespace dflash
