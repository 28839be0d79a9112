// SPDX-License-Identifier: Apache-2.0
// Checks of a call's arguments, shared by reference, kernel, binding and plugin.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// Error message "name: expected ..., found ..."; empty if the call is valid.
using Problem = std::optional<std::string>;

const char* dtype_name(DType dtype);

// Checks sizes, attributes and dtypes, which are known in TensorRT's build phase; no pointers.
Problem check_sizes(const Params& params);

// Runs check_sizes and checks that every tensor is present and aligned. Dereferences nothing: pointers may be device
// pointers.
Problem check_params(const Params& params);

// Checks that the GPU supports the cache's format; `compute_capability` is 10 * major + minor, or 0 if unknown.
Problem check_gpu(bool fp8_cache, int32_t compute_capability);

// Checks the values of slot_ids [B] and context_lengths [B], if they are in host memory; `page_size` is the layout's.
Problem check_requests(const Params& params, int64_t page_size, const int32_t* slot_ids,
                       const int32_t* context_lengths);

// Checks that `workspace` holds at least workspace_size(params) bytes.
Problem check_workspace(const Params& params);

}  // namespace dflash::kv_injection
