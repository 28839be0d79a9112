// SPDX-License-Identifier: Apache-2.0
// Starts kernels on the params' stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/start.cuh"

namespace dflash::kv_injection {

// Allows `most_shared` bytes of shared memory per CTA. This is always the maximum over all launches: the limit is per
// kernel, and a smaller one would break a larger launch that another thread is about to make.
inline cudaError_t start_attention(void (*kernel)(Params, LaunchConfig), const Params& p, const Gpu& gpu,
                                   const LaunchConfig& config, int most_shared) {
  const auto allow = [&](cudaFuncAttribute what, int value) { return cudaFuncSetAttribute(kernel, what, value); };
  cudaError_t error = allow(cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
  if (error != cudaSuccess) return error;
  error = allow(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return start(kernel, gpu, attention_grid(p, config), p.stream, p, config);
}

using Launch = cudaError_t(const Params&, const Gpu&, const LaunchConfig&);

// Launches the second kernel if there is more than one range; defined in head_dim_*.cu.
template <int D>
cudaError_t launch_combine(const Params& p, const Gpu& gpu, const LaunchConfig& config);

inline cudaError_t launch_both(Launch attention, Launch combine, const Params& p, const Gpu& gpu,
                               const LaunchConfig& config) {
  const cudaError_t error = attention(p, gpu, config);
  return error == cudaSuccess ? combine(p, gpu, config) : error;
}

// Whether the GPU has the instructions of wgmma_attention.cuh.
inline bool has_wgmma(const Gpu& gpu) { return gpu.compute_capability() == 90; }

// Kernels that no GPU has run, compiled with DFLASH_EXPERIMENTAL_KERNELS; cudaErrorNotSupported if they do not fit.
cudaError_t launch_short(const Params& p, const Gpu& gpu);  // short.cu
cudaError_t launch_ahead(const Params& p, const Gpu& gpu);  // ahead.cu

}  // namespace dflash::kv_injection
