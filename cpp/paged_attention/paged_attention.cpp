// SPDX-License-Identifier: Apache-2.0
#include "paged_attention/paged_attention.h"

#include <algorithm>

#include "cpu/isa.h"
#include "paged_attention/kernels.h"

namespace dflash {
namespace {

// Multiplications, some 20 us at 100 GFLOP/s, below which waking threads should not pay.
constexpr int64_t kMinWork = 1 << 20;

struct Task {
  const SegmentRows* segment;
  int64_t kv_head, begin, end;
};

AttentionKernels kernels_for(Isa isa, CacheType type) {
#if DFLASH_X86_KERNELS
  if (isa == Isa::kAvx512) return avx512_attention(type);
  if (isa == Isa::kAvx2) return avx2_attention(type);
#endif
  static_cast<void>(isa);
  return scalar_attention(type);
}

// Multiplications of a segment, without the savings by a causal mask or a window.
int64_t work_of(const PagedAttention& layer, const SegmentRows& segment) {
  const int64_t seen = segment.begin + segment.num_tokens;
  const int64_t context = layer.window == 0 ? seen : std::min(seen, layer.window + segment.num_tokens);
  return segment.num_tokens * layer.num_heads * context * (layer.head_dim + layer.value_dim);
}

}  // namespace

void paged_attention(const PagedAttention& layer, const std::vector<SegmentRows>& segments, const Threads& threads,
                     std::string_view isa) {
  const AttentionKernels kernels = kernels_for(isa_named(isa), layer.type);
  std::vector<Task> tasks;
  int64_t work = 0;
  for (const SegmentRows& segment : segments) {
    work += work_of(layer, segment);
    const int64_t rows = segment.num_tokens * layer.group_size();
    for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {
      for (int64_t end = rows; end > 0; end -= kBlockRows) {  // longest segments first
        tasks.push_back({&segment, kv_head, std::max<int64_t>(0, end - kBlockRows), end});
      }
    }
  }
  const Threads openmp_team = work < kMinWork ? Threads{1, nullptr} : threads;
  const int64_t num_segments = segments.size();
  for_each(openmp_team, num_segments * layer.num_kv_heads,
           [&](int64_t i) { kernels.store(layer, segments[i / layer.num_kv_heads], i % layer.num_kv_heads); });
  for_each(openmp_team, tasks.size(), [&](int64_t i) {
    const Task& task = tasks[i];
    kernels.attend(layer, *task.segment, task.kv_head, task.begin, task.end);
  });
}

}  // namespace dflash
