// SPDX-License-Identifier: Apache-2.0
// Reference implementation on a CPU of the attention in params.h, against which the kernel is tested.
#pragma once

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Fills params.out. Computes in float64 and rounds once at the output, so the result is within half a unit in the last
// place of the exact one. Only visible cache rows are read; as the kernel does, it fills the outputs of requests that are
// out of range with NaN (see Params). Throws std::invalid_argument with the message of check_params.
void reference(const Params& params);

}  // namespace dflash::kv_injection
