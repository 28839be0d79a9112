// SPDX-License-Identifier: Apache-2.0
// New context rows on their way into the cache: K and V of all layers in one launch.
//
// Rows come as context.onnx makes them, in the cache's format, so that bytes are moved and nothing is rounded. T rows,
// L layers, G key/value heads, D head_dim, R rows a page. Tensors are dense and row-major.
#pragma once

#include <cstdint>

#include "kv_injection_attention/check.h"

namespace dflash::kv_injection {

struct AppendParams {
  int32_t rows;       // T, 0 is an empty call
  int32_t layers;     // L
  int32_t num_pages;  // of the cache
  int32_t page_rows;  // R, of a page; a dense cache has one page a slot
  int64_t row_bytes;  // of G * D elements, a multiple of 16

  const void* kv;           // [T, 2, L, G, D]: K, then V
  const int32_t* page_ids;  // [T]
  const int32_t* offsets;   // [T], the row in its page
  void* k_cache;            // [pages, L, R, G, D]
  void* v_cache;            // [pages, L, R, G, D]

  void* stream;  // cudaStream_t; the reference leaves it alone
};

// Sizes, and that every tensor is there and aligned.
Problem check_append(const AppendParams& params);

// On the CPU. Skips a row whose page or offset does not exist, as the kernel does.
void append_reference(const AppendParams& params);

// Starts the copy on params.stream and returns at once: no allocation, no synchronisation, capturable.
// `params` has passed check_append. Gives nullptr, or CUDA's text of what went wrong.
const char* launch_append(const AppendParams& params);

}  // namespace dflash::kv_injection
