// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/wgmma_launch_config.h"

namespace dflash::kv_injection {
namespace {

constexpr int32_t kReservedBytes = 1024;  // shared memory that the driver reserves per CTA

int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
int32_t round_up(int32_t a, int32_t b) { return ceil_div(a, b) * b; }

int32_t element_bytes(const Params& p) { return p.cache_dtype == DType::kF8E4M3 ? 1 : 2; }

// Tiles of 16 rows per warp, maximum warps per CTA, and how many of them may cover different rows.
struct Shape {
  int32_t tiles, warps, row_groups;
};

// At most `row_groups` warps cover different rows.
void set_rows(const Params& p, int32_t tiles, int32_t row_groups, LaunchConfig& config) {
  const int32_t D = p.head_dim, warp_rows = 16 * tiles;
  config.group = p.num_heads / p.num_kv_heads;
  config.rows = p.block * config.group;
  config.row_tiles = ceil_div(config.rows, warp_rows * row_groups);
  config.tile_rows = round_up(ceil_div(config.rows, config.row_tiles), config.rows > 16 ? warp_rows : 16);
  config.row_groups = ceil_div(config.tile_rows, warp_rows);
  config.block_rows = round_up(p.block, 16);
  config.block_at = config.tile_rows * row_bytes(D, 2);
  config.stages_at = round_up(config.block_at + 2 * config.block_rows * row_bytes(D, 2), kRowsAlignment);
}

// Teams of warps whose stages fit into a CTA if `parts` CTAs share an SM. The layout of rows, and thus the workspace,
// does not depend on the GPU.
template <class Parts>
void set_teams(const Params& p, const Shape& shape, Parts parts, LaunchConfig& config) {
  const int32_t D = p.head_dim;
  const int32_t bytes = element_bytes(p);
  config.stage_bytes = 2 * step_keys(D, bytes) * row_bytes(D, bytes);
  const int32_t team_bytes = num_stages(D, bytes) * config.stage_bytes;
  const auto teams_in = [&](int32_t shared, int32_t warps) {
    return std::min({kMaxTeams, warps / config.row_groups, (shared - config.stages_at) / team_bytes});
  };
  const auto try_rows = [&](int32_t row_groups) { set_rows(p, shape.tiles, row_groups, config); };
  int32_t row_groups = shape.row_groups;
  for (try_rows(row_groups); teams_in(kSharedBudget, shape.warps) == 0;) try_rows(--row_groups);
  const int32_t ctas = parts();
  const int32_t shared = (config.shared_limit + kReservedBytes) / ctas - kReservedBytes;
  config.teams = std::max(1, teams_in(shared, shape.warps / ctas));
  // The teams' results reuse this memory at the end (see merge.cuh).
  const int32_t values = shape.tiles * (D / 2 + 4);
  const int32_t results =
      results_at(D) + config.teams * results_bytes(32 * config.row_groups, values) + config.tile_rows * kRowOutputBytes;
  config.shared_bytes = std::max(config.stages_at + config.teams * team_bytes, results);
}

// Units of the context rows that a request's block may see, including up to 15 rows before them.
int32_t longest_context(const Params& p) {
  // The page size is known only on the device. Reading starts at a multiple of 16 rows, up to 15 rows before the
  // window.
  const int64_t room = p.max_pages == 1 ? kMaxContext : int64_t{p.max_pages} * kMaxPageSize;
  return static_cast<int32_t>(std::min<int64_t>({room, kMaxContext, window_of(p.sliding_window) + kChunkRows - 2}));
}

}  // namespace

void set_ranges(const Params& p, int32_t ctas, LaunchConfig& config) {
  const int32_t units = p.batch * std::max(1, ceil_div(longest_context(p), kUnitKeys));
  config.ranges = std::clamp(std::min(ctas, kMaxCtas) / columns(p, config), 1, units);
  // Costs are per CTA: while one reads a unit, the others read theirs, but the whole GPU combines partial results.
  const int32_t unit_bytes = 2 * kUnitKeys * p.head_dim * element_bytes(p);
  config.start_cost = kStartBytes / unit_bytes;
  const float partial_bytes = 4.0f * config.tile_rows * (p.head_dim + 2);
  config.split_gain = static_cast<float>(unit_bytes) * ctas / (kPartialCost * partial_bytes * columns(p, config));
  config.combine_warps = 1;
  while (config.combine_warps < kCombineWarps && config.ranges > kPartialsAWarp * config.combine_warps) {
    config.combine_warps *= 2;
  }
}

LaunchConfig make_launch_config(const Params& p, int32_t ctas, int32_t shared_limit) {
  LaunchConfig config{};
  config.shared_limit = shared_limit;
  config.out_factor = 1 / p.out_scale;
  set_teams(p, {warp_tiles(p.head_dim), max_warps(p.head_dim), kMaxRowGroups}, [] { return 1; }, config);
  set_ranges(p, ctas, config);
  return config;
}

bool short_fits(const Params& p) { return p.head_dim == 64 || p.head_dim == 128; }

LaunchConfig make_short_launch_config(const Params& p, int32_t sms, int32_t shared_limit) {
  LaunchConfig config{};
  config.shared_limit = shared_limit;
  config.out_factor = 1 / p.out_scale;
  config.ranges = p.batch;
  const auto ctas_an_sm = [&] { return ceil_div(columns(p, config) * p.batch, sms); };
  set_teams(p, {1, short_warps(p.head_dim), kShortRowGroups}, ctas_an_sm, config);
  return config;
}

Grid attention_grid(const Params& p, const LaunchConfig& config) {
  return {columns(p, config), config.ranges, 32 * config.row_groups * config.teams, config.shared_bytes};
}

Grid combine_grid(const Params& p, const LaunchConfig& config) {
  const int32_t rows_a_cta = kCombineWarps / config.combine_warps;
  const int32_t values = p.head_dim / 32 + 1;  // values that a thread passes on: outputs and the sum
  return {ceil_div(p.block * p.num_heads, rows_a_cta), std::min(p.batch, config.ranges - 1), 32 * kCombineWarps,
          32 * kCombineWarps * values * static_cast<int32_t>(sizeof(float))};
}

size_t workspace_size(const Params& p) {
  if (p.batch == 0) return 0;
  // Per row: the output, its maximum and its sum.
  const auto needed = [&](const LaunchConfig& config) {
    return config.ranges == 1 ? 0 : static_cast<size_t>(partial_rows(p, config)) * (p.head_dim + 2) * sizeof(float);
  };
  const size_t size = needed(make_launch_config(p, kMaxCtas));
  return wgmma_fits(p) ? std::max(size, needed(make_wgmma_launch_config(p, kMaxSms))) : size;
}

}  // namespace dflash::kv_injection
