// SPDX-License-Identifier: Apache-2.0
// Conversions of the storage formats, written for clarity; the kernel uses the hardware's.
#pragma once

#include <cstdint>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Reads element `index` of a tensor. Exact: every value of these formats is an FP32 number.
float load(const void* tensor, int64_t index, DType dtype);

// Writes element `index`, rounded to nearest even; E4M3 saturates.
void store(void* tensor, int64_t index, double value, DType dtype);

}  // namespace dflash::kv_injection
