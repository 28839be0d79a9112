// SPDX-License-Identifier: Apache-2.0
// The storage formats as numbers. Written for reading; the kernel has the hardware's conversions.
#pragma once

#include <cstdint>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Element `index` of a tensor. Exact: every value of these formats is an FP32 number.
float load(const void* tensor, int64_t index, DType dtype);

// Writes element `index`, rounded to nearest even; what is beyond E4M3's largest number becomes that.
void store(void* tensor, int64_t index, double value, DType dtype);

}  // namespace dflash::kv_injection
