// SPDX-License-Identifier: Apache-2.0
#include "linear/linear.h"

namespace dflash {

int64_t row_bytes(WeightFormat format, int64_t cols) {
  switch (format) {
    case WeightFormat::kFloat:
      return 4 * cols;
    case WeightFormat::kFloat16:
    case WeightFormat::kBfloat16:
      return 2 * cols;
    case WeightFormat::kFp8:
    case WeightFormat::kInt4:
      return cols;
    case WeightFormat::kNvfp4:
      break;
  }
  return cols / 2;
}

MultiplyColumns multiply_columns(Isa isa) {
#if DFLASH_X86_KERNELS
  if (isa == Isa::kAvx512) return multiply_columns_avx512;
  if (isa == Isa::kAvx2) return multiply_columns_avx2;
#endif
  static_cast<void>(isa);
  return multiply_columns_scalar;
}

}  // namespace dflash
