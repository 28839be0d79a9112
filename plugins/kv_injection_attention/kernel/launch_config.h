// SPDX-License-Identifier: Apache-2.0
// Launch configuration of a call: derived on the host from sizes alone, read by the kernel.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kv_injection_attention/context_layout.h"

namespace dflash::kv_injection {

// Work is cut into units of this many context rows, which begin at multiples of kChunkRows.
inline constexpr int kUnitKeys = 32;
// Cost of a byte of partial results in bytes of the cache. It is written and read, but mostly in L2, so the two are
// assumed equal; not measured.
inline constexpr float kPartialCost = 1;
// Bytes of the cache that a CTA reads in the time it takes to start a request. Fitted to short and long calls on an
// H100; no other value was tried.
inline constexpr int kStartBytes = 200 << 10;
// Bytes that a CTA of the sm_90a kernel reads in the time that combining takes: the second kernel's wait, schedule,
// loads and stores. Measured with short calls on an H100; no other value was tried.
inline constexpr int kCombineBytes = 160 << 10;
// Partial results of a row that one warp sums sequentially before another warp is used, as long as warps are available.
inline constexpr int kPartialsAWarp = 8;
// All the shared memory that a CTA can have on SM 8.6, 8.9 and 12.x, and half of an SM on 9.0 and 10.x, where two CTAs
// hide each other's latency. The rows of a CTA always fit into it.
inline constexpr int kSharedBudget = 99 * 1024;
// Bounds the workspace: two CTAs per SM on 160 SMs.
inline constexpr int kMaxCtas = 320;
inline constexpr int kMaxTeams = 4;
inline constexpr int kMaxRowGroups = 4;
inline constexpr int kCombineWarps = 8;

// Context rows of a team's step: about 8 KB of K and V.
DFLASH_ANYWHERE constexpr int step_keys(int head_dim, int element_bytes) {
  return head_dim == 256 ? 16 : (head_dim == 64 ? 64 : 32) / element_bytes;
}
// Stages of a team: steps in flight or in use.
DFLASH_ANYWHERE constexpr int num_stages(int head_dim, int element_bytes) {
  return head_dim < 256 ? 4 : element_bytes == 1 ? 5 : 3;
}
// Tiles of 16 query rows per warp. The output takes 8 * head_dim * tiles / 16 registers per thread.
DFLASH_ANYWHERE constexpr int warp_tiles(int head_dim) { return head_dim == 256 ? 1 : 2; }
// Warps per CTA, chosen so that two CTAs share an SM's 65,536 registers: 168 or 255 per thread.
DFLASH_ANYWHERE constexpr int max_warps(int head_dim) { return head_dim == 64 ? 6 : 4; }
// Warps per CTA of short_attention(), with 128 or 168 registers per thread, and how many of them cover different rows,
// 16 each.
DFLASH_ANYWHERE constexpr int short_warps(int head_dim) { return head_dim == 64 ? 15 : 12; }
inline constexpr int kShortRowGroups = 5;
// Stride of rows in shared memory. 16 bytes of padding make eight rows start in eight different bank groups. Rows of 64
// bytes are swizzled instead: two of them are copied at a time, and with padding they would share a bank group.
DFLASH_ANYWHERE constexpr int row_bytes(int head_dim, int element_bytes) {
  const int bytes = head_dim * element_bytes;
  return bytes == 64 ? bytes : bytes + 16;
}
// Rows of kBytes with this stride. Eight lanes access each of the eight bank groups once, whether they read the same 16
// bytes of eight rows, as ldmatrix does, or 128 bytes of one or two rows, as copies do. Swizzled: vector i of row r
// stands at i ^ (r / 2 % 4).
template <int kBytes>
struct StoredRows {
  static constexpr int kStride = row_bytes(kBytes, 1);
  static constexpr bool kSwizzled = kStride == kBytes;
  static constexpr int kPeriod = kSwizzled ? 8 : 1;  // rows after which the swizzle repeats

  // Offset of byte `column` of a row, a multiple of 16.
  DFLASH_ANYWHERE static constexpr uint32_t at(uint32_t row, uint32_t column) {
    return row * kStride + (kSwizzled ? column ^ row / 2 % 4 * 16 : column);
  }
  // Advances the address of one of a row's first 32 bytes by `columns`, a multiple of 32.
  DFLASH_ANYWHERE static constexpr uint32_t ahead(uint32_t address, uint32_t columns) {
    return kSwizzled ? address ^ columns : address + columns;
  }
};
// Alignment of the rows, so that the swizzle matches the banks.
inline constexpr int kRowsAlignment = 128;

// Bytes of one team's results in shared memory, where the teams of a CTA exchange them (see merge.cuh): `values` words
// per thread, and one word between two warps.
inline constexpr int kResultsPadding = 4;  // words per value: a team has at most this many warps, plus one
DFLASH_ANYWHERE constexpr int results_bytes(int threads, int values) {
  return values * (threads + kResultsPadding) * 4;
}

// Offset of the results in attention.cuh: after the first two query rows, whose padding holds the CTA's span.
DFLASH_ANYWHERE constexpr int results_at(int head_dim) { return 2 * row_bytes(head_dim, 2); }

// Bytes per row after those results: the destination of its output, and a weight for each team.
inline constexpr int kRowOutputBytes = 4 * (1 + kMaxTeams);

// The window in positions. Without a window, a distance that no two positions reach and that cannot overflow a sum.
DFLASH_ANYWHERE constexpr int window_of(int sliding_window) {
  constexpr uint32_t kEverything = kMaxContext + kMaxBlock;
  // Without a comparison, whose result would occupy a register throughout the sm_90a kernel; 0 wraps around.
  const uint32_t before = static_cast<uint32_t>(sliding_window) - 1;
  return static_cast<int>((before < kEverything - 1 ? before : kEverything - 1) + 1);
}

struct LaunchConfig {
  int32_t group;          // query heads of a kv head: N/G
  int32_t rows;           // query rows of a (request, kv head): S * group, slot-major
  int32_t row_tiles;      // CTAs that share these rows
  int32_t tile_rows;      // rows per CTA: 16, or full warps of them
  int32_t row_groups;     // warps per team, each with warp_tiles() * 16 of the rows
  int32_t teams;          // teams per CTA, each with its own steps of the context
  int32_t ranges;         // maximum number of CTAs over the context, all requests laid end to end
  int32_t start_cost;     // time to start a request over time to read a unit
  int32_t combine_cost;   // time to combine over time to read a unit: what cutting requests has to save
  float split_gain;       // time to read a unit over time to combine a partial result: see worthwhile_ranges()
  int32_t block_rows;     // S, rounded up to 16
  int32_t block_at;       // offset in shared memory of the block's K, then V; the queries are at 0
  int32_t stages_at;      // offset of the stages: [teams][num_stages()][K | V]
  int32_t stage_bytes;    // bytes of one step of one team
  int32_t shared_bytes;   // bytes per CTA
  int32_t shared_limit;   // maximum of shared_bytes on the GPU
  int32_t combine_warps;  // warps that share a row when partial results are combined
  float out_factor;       // factor of the outputs: 1 / out_scale
  float query_factor;     // sm_90a kernel: turns products of queries and context keys into scores in log2 units
  float key_factor;       // likewise for the block's keys, which have no k_scale
};

struct Grid {
  int32_t x, y;
  int32_t threads, shared_bytes;  // threads per CTA
};

// Shared memory that a CTA may use on a GPU with `sm_bytes` per SM, of which the driver reserves `reserved_bytes` per
// CTA, and at most `cta_bytes` per CTA. On SM 8.0 this is all of the 163 KB, because an SM cannot hold two CTAs of
// kSharedBudget.
constexpr int32_t shared_limit(int32_t sm_bytes, int32_t reserved_bytes, int32_t cta_bytes) {
  return sm_bytes >= 2 * (kSharedBudget + reserved_bytes) ? kSharedBudget : cta_bytes;
}

// The launch for a GPU that runs `ctas` CTAs at once, each with at most `shared_limit` bytes of shared memory, at least
// kSharedBudget. `params` must have passed check_sizes and is not empty.
LaunchConfig make_launch_config(const Params& params, int32_t ctas, int32_t shared_limit = kSharedBudget);

// Whether short_attention() can be compiled for the call's sizes. `params` must have passed check_sizes.
bool short_fits(const Params& params);
// Launch of short_attention(): one CTA for each request and column. The more CTAs an SM holds, the fewer teams each
// has. No workspace is needed.
LaunchConfig make_short_launch_config(const Params& params, int32_t sms, int32_t shared_limit);

// Divides the context into ranges; the rows of `config` must be set.
void set_ranges(const Params& params, int32_t ctas, LaunchConfig& config);

Grid attention_grid(const Params& params, const LaunchConfig& config);
// Grid of the second kernel, which runs if there is more than one range.
Grid combine_grid(const Params& params, const LaunchConfig& config);

// Best number of ranges for `units` units. R ranges take the time to read U / R units and to combine R partial results,
// a U / R + b R, which is minimal at R = sqrt(U a / b).
DFLASH_ANYWHERE inline int32_t worthwhile_ranges(const LaunchConfig& config, int32_t units) {
  const auto best = static_cast<int32_t>(sqrtf(static_cast<float>(units) * config.split_gain));
  const int32_t most = config.ranges < units ? config.ranges : units;
  return best < 1 ? 1 : best < most ? best : most;
}

// CTAs that read the same range: kv heads times row tiles.
DFLASH_ANYWHERE inline int32_t columns(const Params& params, const LaunchConfig& config) {
  return params.num_kv_heads * config.row_tiles;
}

// Rows of partial results in the workspace: each CTA has one place for a request that it continues and one for a
// request that it starts.
DFLASH_ANYWHERE inline int64_t partial_rows(const Params& params, const LaunchConfig& config) {
  return int64_t{2} * config.ranges * columns(params, config) * config.tile_rows;
}

}  // namespace dflash::kv_injection
