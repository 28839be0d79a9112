// SPDX-License-Identifier: Apache-2.0
// Compiled for DFLASH_ARCHITECTURE, on whose GPUs a CTA has at most DFLASH_SHARED bytes of shared memory, and which starts
// kernels early if DFLASH_EARLY is 1. Compiled for DFLASH_HEAD_DIM; with the attention of DFLASH_KERNEL: 0 the general
// one, -1 that of short contexts, else sm_90a's for that many rows, with products ahead if 1000 is added; for the blocks
// and caches that DFLASH_FORMATS names: 0 all, 1 BF16 blocks, 2 BF16 blocks and FP8 caches.
#include "emulated_kernel.h"

#include "kv_injection_attention/kernel/attention.cuh"
#include "kv_injection_attention/kernel/combine.cuh"
#include "kv_injection_attention/kernel/wgmma_attention.cuh"
#include "stream.h"

namespace {

constexpr bool kAhead = DFLASH_KERNEL > 1000;
constexpr int kKernel = DFLASH_KERNEL % 1000;
constexpr bool kShort = kKernel < 0, kBf16Only = DFLASH_FORMATS > 0, kFp8Only = DFLASH_FORMATS > 1 || kAhead;

template <int D, class T, bool kFp8>
void attend(const kv::Params& p, const kv::LaunchConfig& config) {
  if constexpr (kKernel > 0) {
    kv::wgmma_attention<D, kKernel, T, kFp8, kAhead>(p, config);
  } else if constexpr (kShort) {
    kv::short_attention<D, T, kFp8>(p, config);
  } else {
    kv::attention<D, T, kFp8>(p, config);
  }
}

template <int D, class T, bool kFp8>
void run_both(const std::function<void()>& produce, const kv::Params& p, const kv::LaunchConfig& config,
              uint32_t seed) {
  emulator::Stream stream(seed, DFLASH_EARLY);
  const auto launch = [&](const kv::Grid& grid, std::function<void()> kernel) {
    stream.launch(grid.x, grid.y, grid.threads, grid.shared_bytes, std::move(kernel));
  };
  launch({1, 1, 32, 0}, [&] {
    if (kv::tid_x() == 0) produce();
  });
  launch(kv::attention_grid(p, config), [&] { attend<D, T, kFp8>(p, config); });
  if (config.ranges > 1 && !kShort) launch(kv::combine_grid(p, config), [&] { kv::combine<D, T>(p, config); });
  stream.run();
}

}  // namespace

bool takes_workspace() { return !kShort; }

kv::LaunchConfig launch_config(const kv::Params& p, int ctas) {
  return kKernel > 0 ? kv::make_wgmma_launch_config(p, ctas, kAhead)
         : kShort    ? kv::make_short_launch_config(p, ctas, DFLASH_SHARED)
                     : kv::make_launch_config(p, ctas, DFLASH_SHARED);
}

bool run(const std::function<void()>& produce, const kv::Params& p, const kv::LaunchConfig& config, uint32_t seed) {
  constexpr int D = DFLASH_HEAD_DIM;
  if (p.head_dim != D || (kKernel > 0 && config.tile_rows != kKernel)) return false;
  const bool fp8 = p.cache_dtype == kv::DType::kF8E4M3;
  const auto run_format = [&]<class T>(T) {
    if (fp8) return run_both<D, T, true>(produce, p, config, seed), true;
    if constexpr (!kFp8Only) return run_both<D, T, false>(produce, p, config, seed), true;
    return false;
  };
  if (p.block_dtype == kv::DType::kBF16) return run_format(kv::BF16{});
  if constexpr (!kBf16Only) return run_format(kv::F16{});
  return false;
}
