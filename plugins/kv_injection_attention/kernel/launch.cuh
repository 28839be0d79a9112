// SPDX-License-Identifier: Apache-2.0
// How kernels are started on the params' stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/start.cuh"

namespace dflash::kv_injection {

// One CTA may have `most_shared` bytes of shared memory. The same at every launch: this plan's own bytes would forbid a
// larger plan that another thread is about to launch.
inline cudaError_t start_attention(void (*kernel)(Params, Plan), const Params& p, const Plan& plan, int most_shared) {
  const auto allow = [&](cudaFuncAttribute what, int value) { return cudaFuncSetAttribute(kernel, what, value); };
  cudaError_t error = allow(cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
  if (error != cudaSuccess) return error;
  error = allow(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return start(kernel, attention_grid(p, plan), p.stream, p, plan);
}

// The second kernel, where the plan needs it; in head_dim_*.cu.
template <int D>
cudaError_t launch_combine(const Params& p, const Plan& plan);

}  // namespace dflash::kv_injection
