// SPDX-License-Identifier: Apache-2.0
// The checks of a call, shared by reference, kernel, binding and plugin.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// An error as "name: expected ..., found ..."; empty if there is none.
using Problem = std::optional<std::string>;

const char* dtype_name(DType dtype);

// Sizes, attributes and dtypes, which TensorRT's build phase knows; no pointers.
Problem check_sizes(const Params& params);

// check_sizes, and that every tensor is there and aligned. Reads no pointer: they may be the device's.
Problem check_params(const Params& params);

// What a cache needs of the GPU; `compute_capability` is 10 * major + minor, 0 if it is not known.
Problem check_gpu(bool fp8_cache, int32_t compute_capability);

// The values of context_layout, where the host has them.
Problem check_layout(const Params& params, const int64_t* layout);

// The values of slot_ids [B] and context_lengths [B], where the host has them; `page_size` is the layout's.
Problem check_requests(const Params& params, int64_t page_size, const int32_t* slot_ids,
                       const int32_t* context_lengths);

// Checks that `workspace` holds the workspace_size(params) bytes that the kernel needs.
Problem check_workspace(const Params& params);

}  // namespace dflash::kv_injection
