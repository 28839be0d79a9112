// SPDX-License-Identifier: Apache-2.0
// How a call is laid out on the GPU: decided on the host from sizes alone, read by the kernel.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kv_injection_attention/params.h"

#ifdef __CUDACC__
#define DFLASH_ANYWHERE __host__ __device__
#else
#define DFLASH_ANYWHERE
#endif

namespace dflash::kv_injection {

// Context rows that lie in one page, whatever its size: where a unit begins is a multiple of it.
inline constexpr int kChunkRows = 16;
// Work is cut into units of this many context rows.
inline constexpr int kUnitKeys = 32;
// A byte of partial results is written and read, and most of it stays in L2, so it is taken to cost as much as a byte
// of the cache. On paper, not measured.
inline constexpr float kPartialCost = 1;
// Bytes of the cache that a CTA reads in the time that it takes to start a request. From an H100's times of short and
// long calls; other values were not tried.
inline constexpr int kStartBytes = 200 << 10;
// As many as a CTA of sm_90a's kernel reads while partial results are combined: the second kernel's wait, schedule,
// loads and stores. An H100's short calls were measured with it; other values were not tried.
inline constexpr int kCombineBytes = 160 << 10;
// Context rows up to which short_attention() is taken. Counted on paper it is faster up to about 512; no GPU has said
// so yet, and until one does it is taken only where a caller names it.
inline constexpr int kShortRows = 0;
// Partial results of a row that a warp adds up one after another, at most while there are warps.
inline constexpr int kPartialsAWarp = 8;
// All the shared memory of a CTA of SM 8.6, 8.9 and 12.x, and half of an SM of 9.0 or 10.x, where two CTAs hide each
// other's waits. A CTA's rows find room in it everywhere.
inline constexpr int kSharedBudget = 99 * 1024;
// Bounds the workspace: two CTAs on each of 160 SMs.
inline constexpr int kMaxCtas = 320;
inline constexpr int kMaxTeams = 4;
inline constexpr int kMaxRowGroups = 4;
inline constexpr int kCombineWarps = 8;

// Context rows that a team of warps takes at a time: about 8 KB of K and V.
DFLASH_ANYWHERE constexpr int step_keys(int head_dim, int element_bytes) {
  return head_dim == 256 ? 16 : (head_dim == 64 ? 64 : 32) / element_bytes;
}
// Steps of a team in flight or in use.
DFLASH_ANYWHERE constexpr int num_stages(int head_dim, int element_bytes) {
  return head_dim < 256 ? 4 : element_bytes == 1 ? 5 : 3;
}
// Tiles of 16 query rows that a warp holds; its output is 8 * head_dim * tiles / 16 registers a thread.
DFLASH_ANYWHERE constexpr int warp_tiles(int head_dim) { return head_dim == 256 ? 1 : 2; }
// Warps of a CTA, so that two CTAs share an SM's 65,536 registers: 168 or 255 a thread.
DFLASH_ANYWHERE constexpr int max_warps(int head_dim) { return head_dim == 64 ? 6 : 4; }
// Warps of a CTA of short_attention(), of 128 or 168 registers a thread, and of them beside each other, with 16 rows
// each.
DFLASH_ANYWHERE constexpr int short_warps(int head_dim) { return head_dim == 64 ? 15 : 12; }
inline constexpr int kShortRowGroups = 5;
// From a row in shared memory to the next. 16 bytes of padding make eight rows start in eight different bank groups.
// Rows of 64 bytes are swizzled instead: two of them are copied at a time, and padded ones would meet in a bank group.
DFLASH_ANYWHERE constexpr int row_bytes(int head_dim, int element_bytes) {
  const int bytes = head_dim * element_bytes;
  return bytes == 64 ? bytes : bytes + 16;
}
// Rows of kBytes with that stride. Eight lanes take the eight bank groups once, be it with the same 16 bytes of eight
// rows, as ldmatrix does, or with 128 bytes of one row or two, as copies do. Swizzled: vector i of row r stands at i ^
// (r / 2 % 4).
template <int kBytes>
struct StoredRows {
  static constexpr int kStride = row_bytes(kBytes, 1);
  static constexpr bool kSwizzled = kStride == kBytes;
  static constexpr int kPeriod = kSwizzled ? 8 : 1;  // rows after which the places in a row repeat

  // Offset of byte `column` of a row, a multiple of 16.
  DFLASH_ANYWHERE static constexpr uint32_t at(uint32_t row, uint32_t column) {
    return row * kStride + (kSwizzled ? column ^ row / 2 % 4 * 16 : column);
  }
  // From the address of one of a row's first 32 bytes to that `columns`, a multiple of 32, on.
  DFLASH_ANYWHERE static constexpr uint32_t ahead(uint32_t address, uint32_t columns) {
    return kSwizzled ? address ^ columns : address + columns;
  }
};
// Where they begin, so that swizzled rows and banks agree.
inline constexpr int kRowsAlignment = 128;

// Bytes of a team in the results that the teams of a CTA leave in shared memory for each other (see merge.cuh):
// `values` words for each thread, and one between two warps.
inline constexpr int kResultsPadding = 4;  // words of a value: a team has at most so many warps and one
DFLASH_ANYWHERE constexpr int results_bytes(int threads, int values) {
  return values * (threads + kResultsPadding) * 4;
}

// Where they begin in attention.cuh: behind the first two query rows, whose padding has the CTA's span.
DFLASH_ANYWHERE constexpr int results_at(int head_dim) { return 2 * row_bytes(head_dim, 2); }

// Bytes of a row behind those results: where its output goes, and a weight for each team.
inline constexpr int kRowOutputBytes = 4 * (1 + kMaxTeams);

// The window in positions; without one, more than any two positions are apart, so that no sum with it overflows.
DFLASH_ANYWHERE constexpr int window_of(int sliding_window) {
  constexpr int kEverything = kMaxContext + kMaxBlock;
  return sliding_window > 0 && sliding_window < kEverything ? sliding_window : kEverything;
}

struct LaunchConfig {
  int32_t group;          // query heads of a kv head: N/G
  int32_t rows;           // query rows of a (request, kv head): S * group, slot-major
  int32_t row_tiles;      // CTAs beside each other over these rows
  int32_t tile_rows;      // rows of a CTA: 16, or full warps of them
  int32_t row_groups;     // warps of a team, each with warp_tiles() * 16 of the rows
  int32_t teams;          // teams of a CTA, each with its own steps of the context
  int32_t ranges;         // CTAs over the context, all requests laid end to end, at most
  int32_t start_cost;     // time to start a request over time to read a unit
  int32_t combine_cost;   // time to combine at all over time to read a unit: what cutting requests has to save
  float split_gain;       // time to read a unit over time to combine a partial result: see worthwhile_ranges()
  int32_t block_rows;     // S, rounded up to 16
  int32_t block_at;       // offset in shared memory of the block's K, then V; the queries are at 0
  int32_t stages_at;      // offset of the stages: [teams][num_stages()][K | V]
  int32_t stage_bytes;    // of one step of one team
  int32_t shared_bytes;   // of a CTA
  int32_t shared_limit;   // which no CTA of the GPU exceeds
  int32_t combine_warps;  // that share a row when partial results are combined
  float out_factor;       // what outputs are multiplied with: 1 / out_scale
  float query_factor;     // of sm_90a's kernel: products of queries and the context's keys become scores of log2
  float key_factor;       // and those of the block's keys, which have no k_scale
};

struct Grid {
  int32_t x, y;
  int32_t threads, shared_bytes;  // of a CTA
};

// Shared memory that a CTA may take on a GPU with `sm_bytes` in an SM, of which the driver reserves some for each CTA,
// and at most `cta_bytes` in a CTA: on SM 8.0 all of its 163 KB, because an SM has no room for two of kSharedBudget.
constexpr int32_t shared_limit(int32_t sm_bytes, int32_t reserved_bytes, int32_t cta_bytes) {
  return sm_bytes >= 2 * (kSharedBudget + reserved_bytes) ? kSharedBudget : cta_bytes;
}

// The launch for a GPU that holds `ctas` CTAs at once, each with at most `shared_limit` bytes of shared memory, which
// are not less than kSharedBudget. `params` has passed check_sizes and is not empty.
LaunchConfig make_launch_config(const Params& params, int32_t ctas, int32_t shared_limit = kSharedBudget);

// Whether short_attention() is compiled for the call's sizes, and whether it is taken: from sizes alone, so that a
// context beyond kShortRows never meets it. `params` has passed check_sizes.
bool short_fits(const Params& params);
bool short_pays(const Params& params);
// Its launch, of one CTA for each request and column: the more of them an SM holds, the fewer teams has each. It takes
// no workspace.
LaunchConfig make_short_launch_config(const Params& params, int32_t sms, int32_t shared_limit);

// Cuts the context into ranges; the rows of `config` are laid out already.
void set_ranges(const Params& params, int32_t ctas, LaunchConfig& config);

Grid attention_grid(const Params& params, const LaunchConfig& config);
// Grid of the second kernel, which runs where there is more than one range.
Grid combine_grid(const Params& params, const LaunchConfig& config);

// Ranges of `units` units: R of them take the time to read U / R units and to combine R partial results, a U / R + b R,
// which is least at R = sqrt(U a / b).
DFLASH_ANYWHERE inline int32_t worthwhile_ranges(const LaunchConfig& config, int32_t units) {
  const auto best = static_cast<int32_t>(sqrtf(static_cast<float>(units) * config.split_gain));
  const int32_t most = config.ranges < units ? config.ranges : units;
  return best < 1 ? 1 : best < most ? best : most;
}

// CTAs beside each other that read the same ranges: kv heads times row tiles.
DFLASH_ANYWHERE inline int32_t columns(const Params& params, const LaunchConfig& config) {
  return params.num_kv_heads * config.row_tiles;
}

// Rows of partial results in the workspace: for every CTA one that continues a request and one that starts one.
DFLASH_ANYWHERE inline int64_t partial_rows(const Params& params, const LaunchConfig& config) {
  return int64_t{2} * config.ranges * columns(params, config) * config.tile_rows;
}

}  // namespace dflash::kv_injection
