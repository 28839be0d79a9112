// SPDX-License-Identifier: Apache-2.0
// Lays out calls of every block length and many head counts on GPUs of several sizes, and prints what no kernel could run.
#include <algorithm>
#include <cstdio>
#include <initializer_list>

#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/wgmma_launch_config.h"

namespace kv = dflash::kv_injection;

namespace {

// The sm_90a kernel, on a GPU with the same number of SMs.
void check_wgmma(const kv::Params& p, int sms, bool ahead) {
  if (!(ahead ? kv::wgmma_ahead_fits(p) : kv::wgmma_fits(p))) return;
  const kv::LaunchConfig config = kv::make_wgmma_launch_config(p, sms, ahead);
  const int bytes = p.cache_dtype == kv::DType::kF8E4M3 ? 1 : 2;
  const int stages = config.teams * kv::wgmma_stages(p.head_dim, bytes, ahead) * config.stage_bytes;
  const int threads = 32 * config.teams * config.row_groups;
  const auto expect = [&](bool holds, const char* what) {
    if (holds) return;
    std::printf("%s, D %d, %d rows, %d bytes, %d SMs: %s\n", ahead ? "ahead" : "wgmma", p.head_dim, config.rows, bytes,
                sms, what);
  };
  expect(config.shared_bytes <= kv::kWgmmaShared, "too much shared memory");
  expect(config.stages_at + stages <= config.shared_bytes, "stages do not fit");
  expect(config.block_at % 16 == 0 && config.stages_at % kv::kRowsAlignment == 0 && config.stage_bytes % 16 == 0,
         "misaligned");
  expect(kv::wgmma_query_bytes(p.head_dim, config.tile_rows, bytes) % 1024 == 0, "queries that no pattern begins with");
  expect(kv::wgmma_weight_bytes(config.tile_rows) % 1024 == 0, "weights that no pattern begins with");
  expect(config.tile_rows >= config.rows, "rows that no column has");
  expect(threads <= 65536 / (p.head_dim == 64 && !ahead ? 168 : 255), "too many threads for their registers");
  expect(config.ranges == 1 || config.ranges * p.num_kv_heads <= sms, "CTAs that wait for others");
  const size_t used = kv::partial_rows(p, config) * (p.head_dim + 2) * sizeof(float);
  expect(config.ranges == 1 || used <= kv::workspace_size(p), "too little workspace");
}

// On a GPU that holds `ctas` CTAs, each with at most `shared` bytes of shared memory.
void check(const kv::Params& p, int ctas, int shared) {
  const kv::LaunchConfig config = kv::make_launch_config(p, ctas, shared);
  const kv::Grid attention = kv::attention_grid(p, config);
  const int warp_rows = 16 * kv::warp_tiles(p.head_dim), columns = kv::columns(p, config);
  const auto expect = [&](bool holds, const char* what) {
    if (holds) return;
    std::printf("D %d, S %d, N/G %d, G %d, B %d, window %d, %s, %d CTAs of %d bytes: %s\n", p.head_dim, p.block,
                config.group, p.num_kv_heads, p.batch, p.sliding_window,
                p.cache_dtype == kv::DType::kF8E4M3 ? "FP8" : "16 bits", ctas, shared, what);
  };
  expect(config.shared_bytes <= shared && config.shared_limit == shared, "too much shared memory");
  expect(config.stages_at + config.teams * kv::num_stages(p.head_dim, p.cache_dtype == kv::DType::kF8E4M3 ? 1 : 2) *
                                config.stage_bytes <=
             config.shared_bytes,
         "stages do not fit");
  expect(config.stages_at % kv::kRowsAlignment == 0 && config.stage_bytes % 16 == 0, "a misaligned stage");
  expect(config.teams >= 1 && config.teams <= kv::kMaxTeams, "teams beyond the barriers");
  expect(attention.threads <= 32 * kv::max_warps(p.head_dim), "too many threads");
  expect(config.row_tiles * config.tile_rows >= config.rows, "rows that no CTA has");
  expect((config.row_tiles - 1) * config.tile_rows < config.rows, "a CTA without rows");
  expect(config.row_groups * warp_rows >= config.tile_rows, "rows that no warp has");
  expect((config.row_groups - 1) * warp_rows < config.tile_rows, "a warp without rows");
  expect(config.tile_rows == 16 || config.tile_rows == config.row_groups * warp_rows,
         "warps with fewer tiles than others");
  expect(config.block_rows >= p.block && config.block_rows % 16 == 0, "block rows that no matrix has");
  expect(config.ranges == 1 || config.ranges * columns <= ctas, "CTAs that wait for others");
  expect(kv::kCombineWarps % config.combine_warps == 0, "warps of a row in two CTAs");
  const size_t used = kv::partial_rows(p, config) * (p.head_dim + 2) * sizeof(float);
  expect(config.ranges == 1 || used <= kv::workspace_size(p), "too little workspace");
  if (p.batch > 1 || p.sliding_window > 0) return;
  for (const int units : {1, 2, 16, 128, 5000}) {
    // In units of what combining a partial result takes.
    const auto cost = [&](int ranges) { return units * config.split_gain / ranges + ranges; };
    const int ranges = kv::worthwhile_ranges(config, units), most = std::min(units, config.ranges);
    expect(ranges >= 1 && ranges <= most, "ranges beyond the units or the CTAs");
    for (int other = 1; other <= most; ++other) {
      expect(cost(ranges) <= cost(other) * 1.1f + 1, "another number of ranges is faster");
    }
  }
}

// The kernel of short contexts, on a GPU of `sms` SMs, each CTA with at most `shared` bytes.
void check_short(const kv::Params& p, int sms, int shared) {
  if (!kv::short_fits(p)) return;
  const kv::LaunchConfig config = kv::make_short_launch_config(p, sms, shared);
  const kv::Grid grid = kv::attention_grid(p, config);
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) std::printf("short, D %d, %d rows, B %d, %d SMs: %s\n", p.head_dim, config.rows, p.batch, sms, what);
  };
  const int itemsize = p.cache_dtype == kv::DType::kF8E4M3 ? 1 : 2;
  const int stages = config.teams * kv::num_stages(p.head_dim, itemsize) * config.stage_bytes;
  expect(config.shared_bytes <= shared, "too much shared memory");
  expect(config.stages_at + stages <= config.shared_bytes, "stages do not fit");
  expect(grid.y == p.batch && grid.x * config.tile_rows >= p.num_kv_heads * config.rows, "rows that no CTA has");
  expect(config.tile_rows == 16 * config.row_groups, "rows that no warp has");
  expect(config.teams >= 1 && config.teams <= kv::kMaxTeams, "teams beyond the barriers");
  expect(grid.threads <= 32 * kv::short_warps(p.head_dim), "too many threads");
  expect(config.row_groups <= kv::kResultsPadding + 1, "words between warps that a value has no room for");
}

// Eight lanes of ldmatrix, with 16 bytes of eight rows each, and of copies, with 128 bytes in a row or two, meet in no
// bank. Copies of rows that 128 does not divide are left out.
template <int kBytes>
void check_banks() {
  using Rows = kv::StoredRows<kBytes>;
  for (int row = 0; row < 16; ++row) {
    for (int vector = 0; vector < kBytes / 16; ++vector) {
      unsigned read = 0, written = 0;
      for (int lane = 0; lane < 8; ++lane) {
        const int behind = vector / 8 * 8 + lane;
        read |= 1u << Rows::at(row + lane, vector * 16) / 16 % 8;
        written |= 1u << Rows::at(row / 2 * 2 + behind * 16 / kBytes, behind * 16 % kBytes) / 16 % 8;
      }
      if (read != 0xff)
        std::printf("rows of %d bytes: vector %d of row %d and on: a bank read twice\n", kBytes, vector, row);
      if (128 % kBytes != 0 && kBytes % 128 != 0) continue;
      if (written != 0xff) std::printf("rows of %d bytes: row %d: a bank written twice\n", kBytes, row);
    }
  }
}

// Shared memory in KB of an SM and of a CTA by compute capability (CUDA C++ Programming Guide 13.0, 17.1), of which 1 is
// reserved for each CTA.
void check_shared_limits() {
  constexpr struct {
    const char* sm;
    int sm_kb, cta_kb, limit_kb;
  } kGpus[] = {{"8.0, 8.7", 164, 163, 163}, {"8.6, 8.9, 12.x", 100, 99, 99}, {"9.0, 10.x", 228, 227, 99}};
  for (const auto& gpu : kGpus) {
    const int limit = kv::shared_limit(gpu.sm_kb << 10, 1 << 10, gpu.cta_kb << 10);
    if (limit != gpu.limit_kb << 10) std::printf("SM %s: CTAs of %d bytes\n", gpu.sm, limit);
  }
}

// A drafter sharded over eight GPUs has one kv head on each, and still fills the GPU at a context of 4,096.
void check_sharded_drafter(kv::Params p) {
  p.batch = 1, p.block = 10, p.head_dim = 64, p.num_heads = 8, p.num_kv_heads = 1, p.max_pages = 1;
  p.cache_dtype = kv::DType::kBF16;
  const int ranges = kv::worthwhile_ranges(kv::make_launch_config(p, 264), 4096 / kv::kUnitKeys);
  if (ranges < 100) std::printf("a sharded drafter: %d CTAs of 264\n", ranges);
}

}  // namespace

int main() {
  kv::Params p{};
  p.slots = p.layers = 1;
  p.max_pages = 79;
  p.k_scale = p.out_scale = 1;
  p.block_dtype = kv::DType::kBF16;
  check_sharded_drafter(p);
  check_shared_limits();
  check_banks<64>(), check_banks<96>(), check_banks<128>(), check_banks<192>(), check_banks<256>(), check_banks<512>();
  const auto try_sizes = [&] {
    for (const int ctas : {1, 114, 188, 264, 320}) check(p, ctas, kv::kSharedBudget);
    check(p, 108, 163 << 10);  // an A100
    for (const int sms : {1, 132}) {
      for (const bool ahead : {false, true}) check_wgmma(p, sms, ahead);
      for (const int shared : {227 << 10, 99 << 10}) check_short(p, sms, shared);
    }
  };
  const auto try_heads = [&](int group) {
    for (const int kv_heads : {1, 8}) {
      p.num_kv_heads = kv_heads;
      p.num_heads = kv_heads * group;
      for (const int batch : {1, 7, kv::kMaxBatch}) {
        for (const int window : {0, 1, 128}) {
          p.batch = batch;
          p.sliding_window = window;
          try_sizes();
        }
      }
    }
  };
  for (const int head_dim : {64, 96, 128, 256}) {
    for (const kv::DType cache : {kv::DType::kBF16, kv::DType::kF8E4M3}) {
      p.head_dim = head_dim;
      p.cache_dtype = cache;
      for (p.block = 1; p.block <= kv::kMaxBlock; ++p.block) {
        for (const int group : {1, 2, 3, 4, 5, 7, 8, 12, 16, 33, 64, 128}) try_heads(group);
      }
    }
  }
  return 0;
}
