// SPDX-License-Identifier: Apache-2.0
// How kernels are started on the params' stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/start.cuh"

namespace dflash::kv_injection {

// One CTA may have `most_shared` bytes of shared memory. Always the largest: the bytes of this launch would forbid a
// larger one that another thread is about to make.
inline cudaError_t start_attention(void (*kernel)(Params, LaunchConfig), const Params& p, const LaunchConfig& config,
                                   int most_shared) {
  const auto allow = [&](cudaFuncAttribute what, int value) { return cudaFuncSetAttribute(kernel, what, value); };
  cudaError_t error = allow(cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
  if (error != cudaSuccess) return error;
  error = allow(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return start(kernel, attention_grid(p, config), p.stream, p, config);
}

// The second kernel, where there is more than one range; in head_dim_*.cu.
template <int D>
cudaError_t launch_combine(const Params& p, const LaunchConfig& config);

}  // namespace dflash::kv_injection
