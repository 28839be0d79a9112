// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/wgmma_plan.h"

#include <algorithm>

namespace dflash::kv_injection {

bool wgmma_fits(const Params& p) {
  const int32_t rows = p.block * (p.num_heads / p.num_kv_heads);
  return (p.head_dim == 64 || p.head_dim == 128) && wgmma_rows(p.head_dim, rows) > 0;
}

bool wgmma_pays(const Params& p) {
  return p.block * (p.num_heads / p.num_kv_heads) > 32;  // below, either kernel is bound by the memory
}

Plan make_wgmma_plan(const Params& p, int32_t sms) {
  const int32_t D = p.head_dim, bytes = p.cache_dtype == DType::kF8E4M3 ? 1 : 2;
  Plan plan{};
  plan.group = p.num_heads / p.num_kv_heads;
  plan.rows = p.block * plan.group;
  plan.row_tiles = 1;
  plan.tile_rows = wgmma_rows(D, plan.rows);
  plan.row_groups = kWarpgroupWarps;
  plan.teams = wgmma_teams(D);
  plan.block_rows = kMaxBlock;
  plan.block_at = wgmma_block_at(D, plan.tile_rows, bytes);
  plan.stages_at = (plan.block_at + 2 * kMaxBlock * row_bytes(D, 2) + kRowsAlignment - 1) / kRowsAlignment * kRowsAlignment;
  plan.stage_bytes = wgmma_stage_bytes(D, bytes);
  // Later the results of the teams and of the block take the place of the stages (see merge.cuh).
  const int32_t results = results_bytes(32 * plan.row_groups, wgmma_values(D, plan.tile_rows));
  const int32_t stages = plan.teams * wgmma_stages(D, bytes) * plan.stage_bytes;
  plan.shared_bytes =
      plan.stages_at + std::max(stages, (plan.teams + 1) * results + plan.tile_rows * kRowOutputBytes);
  plan_ranges(p, std::min(sms, kMaxSms), plan);
  return plan;
}

}  // namespace dflash::kv_injection
