// SPDX-License-Identifier: Apache-2.0
// The sm_90a kernel for one head_dim. Each wgmma_*.cu instantiates it once and is compiled for sm_90a only.
#pragma once

#include "kv_injection_attention/kernel/launch.cuh"
#include "kv_injection_attention/kernel/wgmma_attention.cuh"

namespace dflash::kv_injection {

template <int D, int N, class T>
cudaError_t launch_wgmma_rows(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  const bool fp8 = p.cache_dtype == DType::kF8E4M3;
  return start_attention(fp8 ? wgmma_attention<D, N, T, true> : wgmma_attention<D, N, T, false>, p, gpu,
                         config, kWgmmaShared);
}

template <int D, class T>
cudaError_t launch_wgmma_format(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  if (config.tile_rows == 32) return launch_wgmma_rows<D, 32, T>(p, gpu, config);
  if (config.tile_rows == 64) return launch_wgmma_rows<D, 64, T>(p, gpu, config);
  if constexpr (wgmma_rows(D, 80) == 80) return launch_wgmma_rows<D, 80, T>(p, gpu, config);
  return cudaErrorInvalidValue;
}

template <int D>
cudaError_t launch_wgmma_head_dim(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  return p.block_dtype == DType::kF16 ? launch_wgmma_format<D, F16>(p, gpu, config)
                                      : launch_wgmma_format<D, BF16>(p, gpu, config);
}

}  // namespace dflash::kv_injection
