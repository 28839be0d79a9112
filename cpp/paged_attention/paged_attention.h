// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/parallel.h"

namespace dflash {

inline constexpr int64_t kTokensPerPage = 32;

enum class CacheType { kF32, kBf16 };

// Rows of one sequence in a pass, which follow its first `begin` tokens.
struct SegmentRows {
  int64_t first_row;
  int64_t num_tokens;
  int64_t begin;
  const int32_t* pages;  // pages of the sequence, in order, including those of these rows
};

// [heads, rows, dim] of the cache's type. Strides are in elements; each row is contiguous.
struct HeadRows {
  const void* data;
  int64_t head_stride;
  int64_t row_stride;
};

// Attention of one layer in a pass. Shape letters: N heads, G KV heads, P pages, D head_dim, E head_dim of V.
struct PagedAttention {
  CacheType type;
  HeadRows query;  // [N, rows, D]
  HeadRows key;    // [G, rows, D]
  HeadRows value;  // [G, rows, E]
  void* k_cache;   // [G, P, D, 32]: the factors of one query element are contiguous
  void* v_cache;   // [G, P, 32, E'], E' = padded(E)
  void* out;       // [rows, N, E]
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t num_pages;
  float scale;
  float softcap;       // 0: off
  int64_t window;      // positions that a token sees, itself included; 0: all
  const float* sinks;  // [N], or null

  [[gnu::always_inline]] int64_t group_size() const { return num_heads / num_kv_heads; }
};

// Row size of V, padded to whole vectors of any instruction set.
inline constexpr int64_t kAlignment = 16;
[[gnu::always_inline]] inline int64_t padded(int64_t dim) { return (dim + kAlignment - 1) / kAlignment * kAlignment; }

// Writes the rows of all segments to the caches and attends with each row to the positions up to its own. A row's bits
// depend only on its sequence and the instruction set ("best" or one of usable_isas()), not on other rows of the pass
// or the number of threads.
void paged_attention(const PagedAttention& layer, const std::vector<SegmentRows>& segments, const Threads& threads,
                     std::string_view isa);

}  // namespace dflash
