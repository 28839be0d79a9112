// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_attention/paged_attention.h"

namespace dflash {

// Kernels of one instruction set for one cache type.
struct AttentionKernels {
  // Writes a segment's rows of one KV head into the caches.
  void (*store)(const PagedAttention& layer, const SegmentRows& segment, int64_t kv_head);
  // Attends with rows [begin, end) of a segment and KV head, at most kBlockRows. Row r is query
  // head r % group_size() of token r / group_size().
  void (*attend)(const PagedAttention& layer, const SegmentRows& segment, int64_t kv_head, int64_t begin, int64_t end);
};

inline constexpr int64_t kBlockRows = 64;  // rows that read a page while it is in the L1 cache

AttentionKernels avx512_attention(CacheType type);
AttentionKernels avx2_attention(CacheType type);
AttentionKernels scalar_attention(CacheType type);

}  // namespace dflash
