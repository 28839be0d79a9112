// SPDX-License-Identifier: Apache-2.0
// What becomes of a row: its output, or a partial result in the workspace for combine.cuh.
#pragma once

#include "kv_injection_attention/kernel/plan.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

inline constexpr float kLog2E = 1.44269504088896340736f;

// Maximum (in units of log2) and sum of a row's weights; the sum counts relative to the maximum.
struct Softmax {
  float maximum, sum;

  // Takes head `head`'s sink in and gives the factor that makes an output of an output counted relative to `maximum`.
  DFLASH_DEVICE float factor(const float* sinks, int head) const {
    if (sinks == nullptr) return inverse(sum);
    const float sink = sinks[head] * kLog2E;
    const float most = fmaxf(maximum, sink);
    const float by = exp2_fast(maximum - most);
    return by * inverse(sum * by + exp2_fast(sink - most));
  }
};

// The workspace: outputs [partial_rows][D], then Softmax [partial_rows].
template <int D>
struct Partials {
  float* outputs;
  Softmax* softmax;

  DFLASH_DEVICE Partials(const Params& p, const Plan& plan)
      : outputs(static_cast<float*>(p.workspace)),
        softmax(reinterpret_cast<Softmax*>(outputs + partial_rows(p, plan) * D)) {}

  // The first row of what the CTA of (range, column) has of a request that it starts, or continues.
  static DFLASH_DEVICE int64_t row(const Params& p, const Plan& plan, int range, int column,
                                   bool starts) {
    const int64_t cta = int64_t{range} * columns(p, plan) + column;
    return (cta * 2 + (starts ? 1 : 0)) * plan.tile_rows;
  }
};

}  // namespace dflash::kv_injection
