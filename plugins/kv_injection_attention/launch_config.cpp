// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/plan.h"
#include "kv_injection_attention/kernel/wgmma_plan.h"

namespace dflash::kv_injection {
namespace {

int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
int32_t round_up(int32_t a, int32_t b) { return ceil_div(a, b) * b; }

int32_t element_bytes(const Params& p) { return p.cache_dtype == DType::kF8E4M3 ? 1 : 2; }

// At most `row_groups` warps beside each other, each with its own rows.
void plan_rows(const Params& p, int32_t row_groups, Plan& plan) {
  const int32_t D = p.head_dim, warp_rows = 16 * warp_tiles(D);
  plan.group = p.num_heads / p.num_kv_heads;
  plan.rows = p.block * plan.group;
  plan.row_tiles = ceil_div(plan.rows, warp_rows * row_groups);
  plan.tile_rows = round_up(ceil_div(plan.rows, plan.row_tiles), plan.rows > 16 ? warp_rows : 16);
  plan.row_groups = ceil_div(plan.tile_rows, warp_rows);
  plan.block_rows = round_up(p.block, 16);
  plan.block_at = plan.tile_rows * row_bytes(D, 2);
  plan.stages_at = round_up(plan.block_at + 2 * plan.block_rows * row_bytes(D, 2), kRowsAlignment);
}

// Teams of warps that find room for their stages.
void plan_teams(const Params& p, Plan& plan) {
  const int32_t D = p.head_dim;
  const int32_t bytes = element_bytes(p);
  plan.stage_bytes = 2 * step_keys(D, bytes) * row_bytes(D, bytes);
  const int32_t team_bytes = num_stages(D, bytes) * plan.stage_bytes;
  for (int32_t row_groups = kMaxRowGroups; plan.teams == 0; --row_groups) {
    plan_rows(p, row_groups, plan);
    plan.teams = std::min({kMaxTeams, max_warps(D) / plan.row_groups,
                           (kSharedBudget - plan.stages_at) / team_bytes});
  }
  // In the end the teams' results take the place of all that (see merge.cuh).
  const int32_t values = warp_tiles(D) * (D / 2 + 4);
  const int32_t results = plan.teams * results_bytes(32 * plan.row_groups, values) + plan.tile_rows * kRowOutputBytes;
  plan.shared_bytes = std::max(plan.stages_at + plan.teams * team_bytes, results);
}

}  // namespace

void plan_ranges(const Params& p, int32_t ctas, Plan& plan) {
  // The size of pages is an input, too; rows before the window are read where its first row shares 16 with them.
  const int64_t room = p.max_pages == 1 ? kMaxContext : int64_t{p.max_pages} * kMaxPageSize;
  const int32_t longest = static_cast<int32_t>(std::min<int64_t>({room, kMaxContext, window_of(p.sliding_window) + kChunkRows - 2}));
  const int32_t units = p.batch * std::max(1, ceil_div(longest, kUnitKeys));
  plan.ranges = std::clamp(std::min(ctas, kMaxCtas) / columns(p, plan), 1, units);
  // While a CTA reads a unit, the others read theirs; partial results are combined by the whole GPU.
  const int32_t unit_bytes = 2 * kUnitKeys * p.head_dim * element_bytes(p);
  plan.start_cost = kStartBytes / unit_bytes;
  const float partial_bytes = 4.0f * plan.tile_rows * (p.head_dim + 2);
  plan.split_gain = static_cast<float>(unit_bytes) * ctas / (kPartialCost * partial_bytes * columns(p, plan));
  plan.combine_warps = 1;
  while (plan.combine_warps < kCombineWarps && plan.ranges > kPartialsAWarp * plan.combine_warps) {
    plan.combine_warps *= 2;
  }
}

Plan make_plan(const Params& p, int32_t ctas) {
  Plan plan{};
  plan_teams(p, plan);
  plan_ranges(p, ctas, plan);
  return plan;
}

Grid attention_grid(const Params& p, const Plan& plan) {
  return {columns(p, plan), plan.ranges, 32 * plan.row_groups * plan.teams, plan.shared_bytes};
}

Grid combine_grid(const Params& p, const Plan& plan) {
  const int32_t rows_a_cta = kCombineWarps / plan.combine_warps;
  const int32_t values = p.head_dim / 32 + 1;  // that a thread passes on: outputs and the sum
  return {ceil_div(p.block * p.num_heads, rows_a_cta), std::min(p.batch, plan.ranges - 1),
          32 * kCombineWarps, 32 * kCombineWarps * values * static_cast<int32_t>(sizeof(float))};
}

size_t workspace_size(const Params& p) {
  if (p.batch == 0) return 0;
  // Of each row the output, its maximum and its sum.
  const auto needed = [&](const Plan& plan) {
    return plan.ranges == 1 ? 0 : static_cast<size_t>(partial_rows(p, plan)) * (p.head_dim + 2) * sizeof(float);
  };
  const size_t size = needed(make_plan(p, kMaxCtas));
  return wgmma_fits(p) ? std::max(size, needed(make_wgmma_plan(p, kMaxSms))) : size;
}

}  // namespace dflash::kv_injection
