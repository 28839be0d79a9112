// SPDX-License-Identifier: Apache-2.0
#include "block_attention/block_attention.h"

namespace dflash {

const char* problem(const BlockAttention& a) {
  if (a.num_kv_heads < 1 || a.num_heads % a.num_kv_heads != 0) return "num_heads: expected a multiple of num_kv_heads";
  if (a.head_dim < 2 || a.head_dim % 2 != 0) return "head_dim: expected an even number";
  if (a.layer < 0 || a.layer >= a.layers) return "layer: expected one of the cache's";
  if (a.sliding_window < 0) return "sliding_window: expected 0 or more";
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t length = a.context_lengths[b];
    if (length < 0 || length > a.pages_per_request * a.page_rows)
      return "context_lengths: expected what the pages hold";
    for (int64_t i = 0; i * a.page_rows < length; ++i) {
      const int32_t page = a.page_ids[b * a.pages_per_request + i];
      if (page < 0 || page >= a.num_pages) return "page_ids: expected pages of the cache";
    }
  }
  return nullptr;
}

AttendHead attend_head(Isa isa) {
#if DFLASH_X86_KERNELS
  if (isa == Isa::kAvx512) return attend_head_avx512;
  if (isa == Isa::kAvx2) return attend_head_avx2;
#endif
  static_cast<void>(isa);
  return attend_head_scalar;
}

}  // namespace dflash
