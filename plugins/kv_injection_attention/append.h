// SPDX-License-Identifier: Apache-2.0
// Appends new context rows to the cache: K and V of all layers in one launch.
//
// Rows arrive in the layout of context.onnx's outputs and in the cache's format, so bytes are copied without rounding.
// T rows, L layers, G key/value heads, D head_dim, R rows a page. Tensors are dense and row-major.
#pragma once

#include <cstdint>

#include "common/export.h"
#include "kv_injection_attention/check.h"

namespace dflash::kv_injection {

struct AppendParams {
  int32_t rows;       // T; 0 makes the call a no-op
  int32_t layers;     // L
  int32_t num_pages;  // pages of the cache
  int32_t page_rows;  // R; a dense cache has one page per slot
  int64_t row_bytes;  // size of G * D elements, a multiple of 16

  const void* kv;           // [T, 2, L, G, D]: K, then V
  const int32_t* page_ids;  // [T]
  const int32_t* offsets;   // [T], row within the page
  void* k_cache;            // [pages, L, R, G, D]
  void* v_cache;            // [pages, L, R, G, D]

  void* stream;  // cudaStream_t; not used by the reference
};

// Checks sizes, and that every tensor is present and aligned.
Problem check_append(const AppendParams& params);

// The append on a CPU. Skips rows whose page or offset does not exist, as the kernel does.
void append_reference(const AppendParams& params);

// Starts the copy on params.stream and returns at once: no allocation, no synchronisation, capturable.
// `params` must have passed check_append. Returns nullptr, or CUDA's error string.
DFLASH_EXPORT const char* dflash_launch_append(const AppendParams& params);

}  // namespace dflash::kv_injection
