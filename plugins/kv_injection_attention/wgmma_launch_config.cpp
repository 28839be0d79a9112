// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/wgmma_launch_config.h"

#include <algorithm>

namespace dflash::kv_injection {

bool wgmma_fits(const Params& p) {
  const int32_t rows = p.block * (p.num_heads / p.num_kv_heads);
  return (p.head_dim == 64 || p.head_dim == 128) && wgmma_rows(p.head_dim, rows) > 0;
}

bool wgmma_pays(const Params& p) {
  return p.block * (p.num_heads / p.num_kv_heads) > 32;  // below this, both kernels are bound by memory bandwidth
}

bool wgmma_ahead_fits(const Params& p) {
  return wgmma_fits(p) && wgmma_pays(p) && p.cache_dtype == DType::kF8E4M3;
}

LaunchConfig make_wgmma_launch_config(const Params& p, int32_t sms, bool ahead) {
  const int32_t D = p.head_dim, bytes = p.cache_dtype == DType::kF8E4M3 ? 1 : 2;
  LaunchConfig config{};
  config.group = p.num_heads / p.num_kv_heads;
  config.rows = p.block * config.group;
  config.row_tiles = 1;
  config.tile_rows = wgmma_rows(D, config.rows);
  config.row_groups = kWarpgroupWarps;
  config.teams = wgmma_teams(D, ahead);
  config.block_rows = kMaxBlock;
  config.block_at = wgmma_block_at(D, config.tile_rows, bytes, ahead);
  config.stages_at =
      (config.block_at + 2 * kMaxBlock * row_bytes(D, 2) + kRowsAlignment - 1) / kRowsAlignment * kRowsAlignment;
  config.query_factor = p.softmax_scale * p.k_scale * 1.44269504088896340736f;  // log2(e)
  config.key_factor = 1 / p.k_scale;
  config.out_factor = 1 / p.out_scale;
  config.stage_bytes = wgmma_stage_bytes(D, bytes);
  // The results of the teams and of the block later reuse the stages' memory (see merge.cuh).
  const int32_t results = results_bytes(32 * config.row_groups, wgmma_values(D, config.tile_rows));
  const int32_t stages = config.teams * wgmma_stages(D, bytes, ahead) * config.stage_bytes;
  config.shared_bytes =
      config.stages_at + std::max(stages, (config.teams + 1) * results + config.tile_rows * kRowOutputBytes);
  set_ranges(p, std::min(sms, kMaxSms), config);
  config.combine_cost = kCombineBytes / (2 * kUnitKeys * D * bytes);
  return config;
}

}  // namespace dflash::kv_injection
