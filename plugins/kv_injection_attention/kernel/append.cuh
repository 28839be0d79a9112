// SPDX-License-Identifier: Apache-2.0
// Copies new context rows into the cache. Each thread copies 16 bytes; the grid covers rows, K and V, and layers.
#pragma once

#include "kv_injection_attention/append.h"
#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

inline constexpr int kAppendThreads = 256;
inline constexpr int kAppendBytes = 16;  // bytes per thread

inline Grid append_grid(const AppendParams& p) {
  const int64_t vectors = int64_t{p.rows} * 2 * p.layers * (p.row_bytes / kAppendBytes);
  return {static_cast<int32_t>((vectors + kAppendThreads - 1) / kAppendThreads), 1, kAppendThreads, 0};
}

__global__ void __launch_bounds__(kAppendThreads) append(const __grid_constant__ AppendParams p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // waits for the producer of the rows and for readers of the cache
  const int vectors = static_cast<int>(p.row_bytes / kAppendBytes);
  const uint32_t index = static_cast<uint32_t>(ctaid_x()) * kAppendThreads + static_cast<uint32_t>(tid_x());
  const int from = static_cast<int>(index / vectors), at = static_cast<int>(index % vectors) * kAppendBytes;
  const int row = from / (2 * p.layers), layer = from % p.layers;
  if (row >= p.rows) return;
  // The host rejects invalid indices only if it can read them. This check prevents writes outside the cache.
  const int page = p.page_ids[row], offset = p.offsets[row];
  if (page < 0 || page >= p.num_pages || offset < 0 || offset >= p.page_rows) return;

  const bool is_v = from / p.layers % 2 == 1;
  const int64_t to = (int64_t{page} * p.layers + layer) * p.page_rows + offset;
  const auto* rows = static_cast<const unsigned char*>(p.kv);
  auto* cache = static_cast<unsigned char*>(is_v ? p.v_cache : p.k_cache);
  st_global_v4(cache + to * p.row_bytes + at, ld_global_v4(rows + from * p.row_bytes + at));
}

}  // namespace dflash::kv_injection
