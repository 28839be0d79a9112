// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/parallel.h"

namespace dflash {

// out = x / sqrt(mean(x^2) + eps) * weight for rows x and out [rows, dim], weight [dim]; corresponds to oneDNN's
// layer_normalization with rms_norm and use_scale. A row's bits depend only on that row and the instruction set.
void rms_norm(const float* x, int64_t rows, int64_t dim, const float* weight, float eps, float* out,
              const Threads& threads);

}  // namespace dflash
