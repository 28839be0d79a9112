// SPDX-License-Identifier: Apache-2.0
// The CUDA kernel, as its callers see it.
#pragma once

#include <cstddef>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Bytes of scratch that launch() needs on any GPU. Plain arithmetic: needs no CUDA.
size_t workspace_size(const Params& params);

// Starts the attention on params.stream and returns at once: no allocation, no synchronisation, capturable.
// `params` has passed check_params and check_workspace. Gives nullptr, or CUDA's text of what went wrong.
const char* launch(const Params& params);

}  // namespace dflash::kv_injection
