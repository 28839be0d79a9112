// SPDX-License-Identifier: Apache-2.0
// Launch configuration of the sm_90a kernel: one CTA per SM, whose teams are warpgroups.
#pragma once

#include "kv_injection_attention/kernel/launch_config.h"

namespace dflash::kv_injection {

inline constexpr int kMaxSms = kMaxCtas / 2;
inline constexpr int kWarpgroupWarps = 4;
// Context rows per step: the M of wgmma.
inline constexpr int kWgmmaKeys = 64;
// All the shared memory that a CTA can have on sm_90.
inline constexpr int kWgmmaShared = 227 * 1024;

// Warpgroups per CTA: 168 registers per thread with head_dim 64, otherwise 255. `ahead`: with products computed ahead,
// whose operands take registers (see attend_ahead).
DFLASH_ANYWHERE constexpr int wgmma_teams(int head_dim, bool ahead = false) { return head_dim == 64 && !ahead ? 3 : 2; }
// Stages of a team, in flight or in use: as many as fit.
DFLASH_ANYWHERE constexpr int wgmma_stages(int head_dim, int element_bytes, bool ahead = false) {
  if (head_dim == 64 && ahead) return 8;
  return head_dim == 64 ? (element_bytes == 1 ? 5 : 3) : (element_bytes == 1 ? 4 : 2);
}
// The N of wgmma: query rows, rounded up to a compiled size; 0 if there are too many.
DFLASH_ANYWHERE constexpr int wgmma_rows(int head_dim, int rows) {
  if (rows <= 32) return 32;
  if (rows <= 64) return 64;
  return rows <= 80 && head_dim == 64 ? 80 : 0;
}

// Bytes in shared memory of a CTA's queries (16-bit and, for an FP8 cache, then 8-bit) and of a team's weights:
// SwizzledRows of wgmma.cuh.
DFLASH_ANYWHERE constexpr int wgmma_query_bytes(int head_dim, int rows, int element_bytes) {
  return head_dim * rows * (element_bytes == 1 ? 3 : 2);
}
DFLASH_ANYWHERE constexpr int wgmma_weight_bytes(int rows) { return kWgmmaKeys * rows * 2; }
// Weight buffers per team.
DFLASH_ANYWHERE constexpr int wgmma_weight_places(bool ahead) { return ahead ? 2 : 1; }
// Bytes of one number per warp of a team and row.
DFLASH_ANYWHERE constexpr int wgmma_number_bytes(int rows) { return kWarpgroupWarps * rows * 4; }
// Bytes of a CTA's stored span and the factor of its scores.
inline constexpr int kSpanBytes = 48;
// Offset of the block's K: after queries, weights, numbers, each row's slot, and the span.
DFLASH_ANYWHERE constexpr int wgmma_block_at(int head_dim, int rows, int element_bytes, bool ahead = false) {
  const int each = wgmma_weight_places(ahead) * wgmma_weight_bytes(rows) + wgmma_number_bytes(rows);
  const int queries = wgmma_query_bytes(head_dim, rows, element_bytes);
  return queries + wgmma_teams(head_dim, ahead) * each + rows * 4 + kSpanBytes;
}
// Values that a thread stores for the merge: a maximum, a sum and D / 32 outputs for each of its N / 4 columns.
DFLASH_ANYWHERE constexpr int wgmma_values(int head_dim, int rows) { return rows / 4 * (head_dim / 32 + 2); }
// Bytes of one step.
DFLASH_ANYWHERE constexpr int wgmma_stage_bytes(int head_dim, int element_bytes) {
  return 2 * kWgmmaKeys * row_bytes(head_dim, element_bytes);
}

// Whether the kernel is compiled for the call's sizes. `params` must have passed check_sizes.
bool wgmma_fits(const Params& params);
// Whether the kernel is used by default for a call that fits: if mma.sync would pad rows or be slower than reading an
// FP8 cache, by calculation.
bool wgmma_pays(const Params& params);

// Whether the variant with products computed ahead is compiled for them: an FP8 cache and more than 32 rows.
bool wgmma_ahead_fits(const Params& params);

// The launch for a GPU with `sms` SMs, for calls that fit: tile_rows is N, row_groups the warps per team.
LaunchConfig make_wgmma_launch_config(const Params& params, int32_t sms, bool ahead = false);

}  // namespace dflash::kv_injection
