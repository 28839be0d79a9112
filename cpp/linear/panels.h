// SPDX-License-Identifier: Apache-2.0
// A linear layer in FLOAT whose weight is laid out so that each vector belongs to adjacent columns of out.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/parallel.h"

namespace dflash {

inline constexpr int64_t kPanel = 16;         // columns per panel
inline constexpr int64_t kPanelsAtATime = 4;  // panels per task, enough for a tile with many sums

struct PanelLinear {
  int64_t num_rows;     // M
  int64_t num_inputs;   // K
  int64_t num_outputs;  // N
  const float* x;       // [M, K]
  const float* weight;  // [ceil(N / kPanel), K, kPanel]; columns from N on are not used
  const float* bias;    // [N], or null
  float* out;           // [M, N]
};

// Computes layers of this shape whose operands are contiguous, starting with `first`; counts[e] is the M of layer e.
// Each number is the sum of its products in the order of K, then the bias, on every instruction set; it does not depend
// on other rows or the number of threads. `isa` is "best" or one of usable_isas(). Throws std::invalid_argument if the
// CPU lacks it.
void linear(const PanelLinear& first, const std::vector<int64_t>& counts, const Threads& threads, std::string_view isa);

// Computes panels [begin, end) of out.
void multiply_panels_avx512(const PanelLinear& layer, int64_t begin, int64_t end);
void multiply_panels_avx2(const PanelLinear& layer, int64_t begin, int64_t end);
void multiply_panels_scalar(const PanelLinear& layer, int64_t begin, int64_t end);

}  // namespace dflash
