// SPDX-License-Identifier: Apache-2.0
// The attention of params.h on a CPU, to read and to test the kernel against.
#pragma once

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Fills params.out. All is float64 but for one rounding at the output, so the result is the exact
// one to within half a unit of block_dtype. Of the caches only what is visible is read.
// Throws std::invalid_argument with the text of check_params or check_requests.
void reference(const Params& params);

}  // namespace dflash::kv_injection
