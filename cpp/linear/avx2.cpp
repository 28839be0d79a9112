// SPDX-License-Identifier: Apache-2.0
#include "linear/multiply.h"

namespace dflash {

void multiply_columns_avx2(const Linear& linear, int64_t begin, int64_t end) { multiply(linear, begin, end); }

}  // namespace dflash
