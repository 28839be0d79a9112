// SPDX-License-Identifier: Apache-2.0
// Checks context_pointers and context_layout, whose values only the device knows. For the reference and the kernels.
#pragma once

#include <cstdint>
#include <limits>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

inline constexpr int64_t kContextAlignment = 16;
// Rows that the kernels find at a time; they never cross a page, whatever its size.
inline constexpr int32_t kChunkRows = 16;
inline constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max();
// So that offsets within a chunk fit in 32 bits.
inline constexpr int64_t kMaxRowStride = std::numeric_limits<int32_t>::max() / kChunkRows;

// Context rows that a row of the page table can hold; 0 if `pointer` [kPointerSize] or `layout` [kLayoutSize] is invalid.
DFLASH_ANYWHERE constexpr int32_t most_context_rows(int32_t max_pages, const int64_t* pointer, const int64_t* layout) {
  const int64_t address = pointer[kAddress], size = layout[kPageSize], row = layout[kRowStride];
  const bool is_intact = address > 0 && pointer[kChecksum] == context_checksum(address, layout);
  const int64_t any_bit = address | layout[kPageStride] | layout[kKVStride] | row | layout[kHeadStride];
  const bool is_aligned = any_bit % kContextAlignment == 0;
  const bool is_bounded = row >= 0 && row <= kMaxRowStride && layout[kNumPages] > 0 && layout[kNumPages] <= kMaxPages;
  const bool divides = max_pages == 1 ? size > 0 && size <= kMaxContext : size == 16 || size == 32 || size == 64;
  if (!is_intact || !is_aligned || !is_bounded || !divides) return 0;
  const int64_t rows = max_pages * size;
  return static_cast<int32_t>(rows < kMaxContext ? rows : kMaxContext);
}

}  // namespace dflash::kv_injection
