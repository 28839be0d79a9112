// SPDX-License-Identifier: Apache-2.0
// count_kernel KERNEL CONTEXT S N G D ITEM SMS SM_BYTES: how the host lays out a call of one request.
//
// ITEM: bytes of a cache's element; SMS and SM_BYTES: a GPU's SMs and the shared memory of each. Prints the numbers of
// tools/count_kernel.py's LaunchConfig.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "kv_injection_attention/kernel/wgmma_launch_config.h"

using namespace dflash::kv_injection;

namespace {

constexpr int kReservedBytes = 1024;  // shared memory that the driver reserves per CTA

// Lanes beyond one of eight whose 16 bytes lie in the same bank group, at the places that `at` gives them.
template <class At>
int conflicts(At at) {
  int lanes[8] = {};
  for (int i = 0; i < 8; ++i) ++lanes[at(i) / 16 % 8];
  return *std::max_element(lanes, lanes + 8) - 1;
}

template <int kBytes>
void print_conflicts() {
  using Rows = StoredRows<kBytes>;
  constexpr int kVectors = kBytes / 16;
  std::printf("%d %d\n", conflicts([](int i) { return Rows::at(i, 0); }),
              conflicts([](int i) { return Rows::at(i / kVectors, i % kVectors * 16); }));
}

void print(const std::string& kernel, int context, int S, int N, int G, int D, int item, int sms, int sm_bytes) {
  const bool is_short = kernel == "short", ahead = kernel == "ahead", wgmma = ahead || kernel == "wgmma";
  Params p{};
  p.batch = p.slots = p.layers = p.max_pages = 1;
  p.block = S, p.num_heads = N, p.num_kv_heads = G, p.head_dim = D;
  p.block_dtype = DType::kBF16, p.cache_dtype = item == 1 ? DType::kF8E4M3 : DType::kBF16;

  const int cta_bytes = sm_bytes - kReservedBytes, limit = shared_limit(sm_bytes, kReservedBytes, cta_bytes);
  const int of_mma = sm_bytes / (make_launch_config(p, 1, limit).shared_bytes + kReservedBytes);  // see launch.cu
  const LaunchConfig config = wgmma      ? make_wgmma_launch_config(p, sms, ahead)
                              : is_short ? make_short_launch_config(p, sms, cta_bytes)
                                         : make_launch_config(p, sms * std::clamp(of_mma, 1, 2), limit);
  const int units = context / kUnitKeys, parts = is_short ? 1 : worthwhile_ranges(config, units);
  std::printf("%d %d %d %d %d %d %d %d %d ", config.tile_rows, config.row_groups, config.teams,
              wgmma ? wgmma_stages(D, item, ahead) : num_stages(D, item), config.shared_bytes,
              wgmma ? kWgmmaKeys : step_keys(D, item), is_short ? 1 : warp_tiles(D),
              units - units / parts <= config.combine_cost ? 1 : parts,  // see Schedule
              config.combine_warps);
  switch (D * item) {
    case 64: return print_conflicts<64>();
    case 96: return print_conflicts<96>();
    case 128: return print_conflicts<128>();
    case 192: return print_conflicts<192>();
    case 256: return print_conflicts<256>();
    case 512: return print_conflicts<512>();
    default: std::exit(1);
  }
}

}  // namespace

int main(int, char** arguments) {
  int n[8];
  for (int i = 0; i < 8; ++i) n[i] = std::atoi(arguments[2 + i]);
  print(arguments[1], n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]);
}
