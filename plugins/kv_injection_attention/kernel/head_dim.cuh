// SPDX-License-Identifier: Apache-2.0
// Both kernels for one head_dim. Each head_dim_*.cu instantiates them once, so that they compile in parallel.
#pragma once

#include "kv_injection_attention/kernel/attention.cuh"
#include "kv_injection_attention/kernel/combine.cuh"
#include "kv_injection_attention/kernel/launch.cuh"

namespace dflash::kv_injection {

template <int D, class T>
cudaError_t launch_attention(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  const bool fp8 = p.cache_dtype == DType::kF8E4M3;
  return start_attention(fp8 ? attention<D, T, true> : attention<D, T, false>, p, gpu, config, config.shared_limit);
}

template <int D>
cudaError_t launch_head_dim(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  return p.block_dtype == DType::kF16 ? launch_attention<D, F16>(p, gpu, config)
                                      : launch_attention<D, BF16>(p, gpu, config);
}

template <int D>
cudaError_t launch_combine(const Params& p, const Gpu& gpu, const LaunchConfig& config) {
  if (config.ranges == 1) return cudaSuccess;
  const auto kernel = p.block_dtype == DType::kF16 ? combine<D, F16> : combine<D, BF16>;
  return start(kernel, gpu, combine_grid(p, config), p.stream, p, config);
}

}  // namespace dflash::kv_injection
