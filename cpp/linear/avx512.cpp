// SPDX-License-Identifier: Apache-2.0
#include "linear/multiply.h"
#include "linear/multiply_panels.h"

namespace dflash {

void multiply_columns_avx512(const Linear& linear, int64_t begin, int64_t end) { multiply(linear, begin, end); }

void multiply_panels_avx512(const PanelLinear& layer, int64_t begin, int64_t end) {
  multiply_panels(layer, begin, end);
}

}  // namespace dflash
